"""Arms that train at the same time: on a CPU, and where both fit the GPU. Arms are fakes."""

from __future__ import annotations

import pytest

from helpers.fakes import H200, FakeProcess, install
from helpers.later_arms import pairs
from pytest_fp8 import ArmError, Case
from pytest_fp8.arms.pair import PairArms
from pytest_fp8.arms.pool import ArmPool
from pytest_fp8.codes import R
from pytest_fp8.plan import FP8, REFERENCE, Ask
from pytest_fp8.questions.loss.check import loss_of

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
