"""Measures the cases that no gate asks, for the pages that quote them:

    pytest benchmarks/claims/test_measure.py --fp8-gpu=h200 --fp8-update="torch 2.13" \\
        --fp8-baselines benchmarks/claims/measured
"""

from collections.abc import Callable

import pytest

from benchmarks.claims.cases import ALL, QUESTIONS
from pytest_fp8 import Fp8Pair


def asking(question: str) -> Callable[[Fp8Pair], None]:
    @pytest.mark.fp8(cases=ALL, question=question)
    def test(fp8_pair: Fp8Pair) -> None:
        getattr(fp8_pair, f"assert_{question}")()

    return test


test_layers, test_numerics, test_loss, test_speedup, test_memory = map(asking, QUESTIONS)
