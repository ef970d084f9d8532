"""Is it really faster? And does the clock that says so read 1.00 when nothing differs?"""

import pytest

import matrix
from floor import assert_faster
from pytest_fp8 import Verdict


@pytest.mark.fp8(cases=matrix.ALL, question="speedup")
def test_speedup_holds_its_baseline(fp8_pair):
    fp8_pair.assert_speedup()


@pytest.mark.fp8(cases=matrix.ALL, question="speedup")
def test_faster_than_bf16(request, fp8_pair):
    assert_faster(request, fp8_pair)


@pytest.mark.fp8(cases=[matrix.NULL], question="speedup")
def test_bf16_against_bf16_reads_one(fp8_pair):
    fp8_pair.timing_evidence(look=1)  # of two processes: one may lie as far from 1.00 as a process can
    decision = fp8_pair.faster(floor=0.97)  # no baseline is stored of two equal arms
    low, high = decision.numbers["low"], decision.numbers["high"]
    assert decision.verdict is not Verdict.INVALID, decision.message
    assert low < 1 < high, decision.message
    assert high - low < 0.03, "the clock is too coarse to see a loss of 3 %"
