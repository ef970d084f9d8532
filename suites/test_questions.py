"""Every question, asked of every case of the suite."""

import pytest

import matrix
from floor import assert_faster
from pytest_fp8 import Case, Verdict

CASES = [*matrix.ALL, *matrix.OWN]


@pytest.mark.fp8(cases=CASES, question="layers")
def test_layers(fp8_pair):
    fp8_pair.assert_layers()


@pytest.mark.fp8(cases=CASES, question="numerics")
def test_numerics(fp8_pair):
    fp8_pair.assert_numerics()


@pytest.mark.fp8(cases=CASES, question="loss")
def test_loss(fp8_pair):
    fp8_pair.assert_loss()


@pytest.mark.nightly
@pytest.mark.fp8(cases=matrix.LONG, question="loss")
def test_what_begins_later(fp8_pair):
    fp8_pair.assert_loss(steps=300)


@pytest.mark.fp8(cases=CASES, question="speedup")
def test_speedup_holds_its_baseline(fp8_pair):
    fp8_pair.assert_speedup()


@pytest.mark.fp8(cases=CASES, question="speedup")
def test_faster_than_bf16(request, fp8_pair):
    assert_faster(request, fp8_pair)


@pytest.mark.fp8(cases=[matrix.NULL], question="speedup")
def test_bf16_against_bf16_reads_one(fp8_pair):
    """The clock reads 1.00 where nothing differs."""
    fp8_pair.timing_evidence(look=1)  # of two processes: one may lie as far from 1.00 as a process can
    decision = fp8_pair.faster(floor=0.97)  # no baseline is stored of two equal arms
    low, high = decision.numbers["low"], decision.numbers["high"]
    assert decision.verdict is not Verdict.INVALID, decision.message
    assert low < 1 < high, decision.message
    assert high - low < 0.03, "the clock is too coarse to see a loss of 3 %"


@pytest.mark.fp8(cases=CASES, question="memory")
def test_memory(fp8_pair):
    fp8_pair.assert_memory()


@pytest.mark.fp8(cases=CASES, question="checkpoints")
def test_checkpoints(fp8_pair):
    fp8_pair.assert_checkpoints()


@pytest.mark.nightly
@pytest.mark.fp8(cases=[Case("182m", "torchao", "tensorwise"), *matrix.ONE_B, matrix.EIGHT_B[0]])
def test_where_fp8_pays(healthy_alone, fp8_pair):
    """It judges nothing; docs/where-fp8-pays.md says how to read it."""
    assert fp8_pair.where_it_pays().verdict is Verdict.PASS
