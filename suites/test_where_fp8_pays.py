"""Which layers and which recipe pay here? It judges nothing; docs/where-fp8-pays.md says how to read it."""

import pytest

import matrix
from pytest_fp8 import Case, Verdict


@pytest.mark.nightly
@pytest.mark.fp8(cases=[Case("182m", "torchao", "tensorwise"), *matrix.ONE_B, matrix.EIGHT_B[0]])
def test_where_fp8_pays(healthy_alone, fp8_pair):
    assert fp8_pair.where_it_pays().verdict is Verdict.PASS
