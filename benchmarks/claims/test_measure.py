"""Measures the cases that no gate asks, for the pages that quote them:

    pytest benchmarks/claims/test_measure.py --fp8-gpu=h200 --fp8-update="torch 2.13" \\
        --fp8-baselines benchmarks/claims/measured
"""

import pytest

from benchmarks.claims.cases import ALL
from pytest_fp8 import Fp8Pair


@pytest.mark.fp8(cases=ALL, question="layers")
def test_layers(fp8_pair: Fp8Pair) -> None:
    fp8_pair.assert_layers()


@pytest.mark.fp8(cases=ALL, question="numerics")
def test_numerics(fp8_pair: Fp8Pair) -> None:
    fp8_pair.assert_numerics()


@pytest.mark.fp8(cases=ALL, question="loss")
def test_loss(fp8_pair: Fp8Pair) -> None:
    fp8_pair.assert_loss()


@pytest.mark.fp8(cases=ALL, question="speedup")
def test_speedup(fp8_pair: Fp8Pair) -> None:
    fp8_pair.assert_speedup()


@pytest.mark.fp8(cases=ALL, question="memory")
def test_memory(fp8_pair: Fp8Pair) -> None:
    fp8_pair.assert_memory()
