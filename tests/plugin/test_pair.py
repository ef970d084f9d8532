"""What ``fp8_pair`` asks: the two questions about speed, a measurement that failed; and arms that train at the same
time, on a CPU and where both fit the GPU. Arms are fakes."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from helpers.baselines import baseline
from helpers.fakes import H200, FakeProcess, install, pairs
from pytest_fp8 import ArmError, Case, CheckFailed, Verdict
from pytest_fp8.arms.pair import PairArms
from pytest_fp8.arms.pool import ArmPool
from pytest_fp8.codes import R
from pytest_fp8.pair import Fp8Pair
from pytest_fp8.plan import FP8, REFERENCE, Ask
from pytest_fp8.questions.loss.check import loss_of
from pytest_fp8.report.record import CaseNotes, Notes

CASE = Case("1b", "torchao", "rowwise", floor=1.05)


@pytest.fixture
def ask(monkeypatch):
    """``ask(speedup, stored)``: a pair whose FP8 arm is so much faster, with a baseline of that speedup or none."""
    pools = []

    def made(speedup=1.2, stored=None, strict=False):
        install(monkeypatch, H200, speedup=speedup)
        pools.append(ArmPool(H200))
        metrics = {"speedup": [[math.log(stored)] * 8] * 4} if stored else None
        held = baseline(CASE.id, "hash", metrics=metrics) if metrics else None
        arms = PairArms(CASE, pools[-1], None)
        settings = SimpleNamespace(update=False, strict=strict, processes=4)
        notes = Notes()
        return Fp8Pair(arms, settings, CaseNotes(notes, arms.case.id, "a model"), held, "file.json"), notes

    yield made
    for pool in pools:
        pool.close()


def noted(notes):
    return {answer.question: answer.verdict for answer in notes.answers}


def test_faster_asks_the_floor_and_nothing_else(ask):
    pair, notes = ask(1.2, stored=1.5)
    assert pair.assert_faster().verdict is Verdict.PASS
    assert noted(notes) == {"faster": "PASS"}
    with pytest.raises(CheckFailed, match=r"FP8 is not faster than the best BF16[\s\S]*floor 1\.30x"):
        pair.assert_faster(floor=1.3)


def test_the_case_gives_the_floor(ask):
    with pytest.raises(CheckFailed, match=r"floor 1\.05x"):
        ask(1.02)[0].assert_faster()


def test_speedup_asks_the_baseline_and_nothing_else(ask):
    pair, notes = ask(1.0, stored=1.0)
    assert pair.assert_speedup().verdict is Verdict.PASS
    assert noted(notes) == {"speedup": "PASS"}
    with pytest.raises(CheckFailed, match="lost speed against BF16 since the baseline"):
        ask(1.2, stored=1.5)[0].assert_speedup()
    decision = ask(1.2)[0].assert_speedup()
    assert decision.verdict is Verdict.NOT_EXERCISED
    assert "file.json" in decision.message


def test_a_measurement_that_failed_is_taken_anew_as_a_whole(ask, monkeypatch):
    pair, _ = ask()
    real, calls = FakeProcess.blocks, []

    def fails_once(self, **asked):
        calls.append(asked)
        if len(calls) == 6:
            raise ArmError(R.ARM_DIED, "the arm died")
        return real(self, **asked)

    monkeypatch.setattr(FakeProcess, "blocks", fails_once)
    with pytest.raises(ArmError):
        pair.timing_evidence()
    evidence = pair.timing_evidence()
    assert [len(x) for x in (*evidence.bf16, *evidence.fp8)] == [12, 12]


# -- arms that train at the same time --------------------------------------------------------------------------------


EMULATED = Case("tiny", "torchao", "tensorwise", emulated=True)


@pytest.fixture
def world(monkeypatch):
    return install(monkeypatch, H200)


def both(arms):
    yield Ask(REFERENCE, "numerics", moved=True), Ask(FP8, "numerics", moved=False)


@pytest.mark.parametrize("gpu", [H200, None])
def test_steps_that_are_recorded_go_together_on_a_cpu_alone(world, monkeypatch, gpu):
    sent = []
    send = FakeProcess.send
    monkeypatch.setattr(FakeProcess, "send", lambda self, *a, **b: sent.append(self) or send(self, *a, **b))
    pool = ArmPool(gpu)
    [pair] = pairs(pool, "own", "tensorwise")
    pair.start()
    pair.run(lambda: both(pair))
    assert bool(sent) is (gpu is None)
    pool.close()


@pytest.fixture
def told(monkeypatch):
    """What arms were asked to and answered, in order: each beginning and each end of a curve."""
    seen: list[str] = []
    send, curve = FakeProcess.send, FakeProcess.curve

    def note_send(self, operation, **arguments):
        seen.append(f"{self.spec.case.backend} begins")
        send(self, operation, **arguments)

    def note_curve(self, *arguments, **named):
        seen.append(self.spec.case.backend)
        return curve(self, *arguments, **named)

    monkeypatch.setattr(FakeProcess, "send", note_send)
    monkeypatch.setattr(FakeProcess, "curve", note_curve)
    return seen


def test_arms_that_fit_a_gpu_together_train_together_and_others_one_after_the_other(world, told, monkeypatch):
    pool = ArmPool(H200)
    [pair] = pairs(pool, "tiny", "tensorwise")
    pair.start()
    pair.run(lambda: loss_of(pair, True))
    assert told[:4] == ["torchao begins", "bf16", "bf16", "torchao"]
    told.clear()
    monkeypatch.setattr(ArmPool, "tight", lambda *_, **__: True)
    [another] = pairs(pool, "tiny", "rowwise")
    another.start()
    another.run(lambda: loss_of(another, True))
    assert told == ["torchao"] * 3, "one after the other; the reference's curves are known"
    pool.close()


def test_an_answer_that_nobody_fetches_goes_with_its_process(world, monkeypatch):
    curve = FakeProcess.curve

    def fail(self, *arguments, **named):
        if not self.is_fp8:
            raise ArmError(R.ARM_RAISED, "the reference failed")
        return curve(self, *arguments, **named)

    monkeypatch.setattr(FakeProcess, "curve", fail)
    pool = ArmPool(None)
    pair = PairArms(EMULATED, pool, None)
    pair.start()
    before = pool.live(pair.fp8)
    with pytest.raises(ArmError, match="the reference failed"):
        pair.run(lambda: loss_of(pair, True))
    assert not before.alive
    assert pair.fp8.request("logits", seed=0), "a fresh process answers"
    pool.close()
