"""The loop that asks arms which take turns: what it asks of which arm, errors, interrupts, and what is kept."""

from __future__ import annotations

import pytest

from helpers.fakes import H100, FakeProcess, install
from pytest_fp8 import ArmError, Case
from pytest_fp8.arms.pair import PairArms
from pytest_fp8.arms.pool import ArmPool
from pytest_fp8.codes import R
from pytest_fp8.plan import FP8, REFERENCE, Ask


@pytest.fixture
def pair(monkeypatch):
    """Its arms take turns; the reference is alive."""
    install(monkeypatch, H100)
    pool = ArmPool(H100)
    pair = PairArms(Case("8b", "torchao", "tensorwise"), pool, None)
    pair.start()
    assert pair.takes_turns
    yield pair
    pool.close()


@pytest.fixture
def asked(monkeypatch):
    """What was asked of which arm, in order."""
    seen = []
    real = FakeProcess.request

    def request(self, operation, timeout=0, **arguments):
        seen.append((FP8 if self.is_fp8 else REFERENCE, operation))
        return real(self, operation, timeout, **arguments)

    monkeypatch.setattr(FakeProcess, "request", request)
    return seen


def both(operation):
    def question():
        reference, fp8 = yield Ask(REFERENCE, operation, seed=0, fresh=True), Ask(FP8, operation, seed=0, fresh=True)
        return reference, fp8

    return question


def test_each_arm_answers_all_it_can_before_the_other_is_built(pair, asked):
    assert pair.gather({"one": both("restart"), "two": both("logits")}) == {}
    assert asked == [(REFERENCE, "restart"), (REFERENCE, "logits"), (FP8, "restart"), (FP8, "logits")]


def test_requests_to_one_arm_that_belong_together_are_not_parted(pair, asked):
    def chain():
        for operation in ("restart", "logits", "restart"):
            yield Ask(REFERENCE, operation, fresh=True, seed=0)
        yield Ask(FP8, "logits", fresh=True, seed=0)

    pair.gather({"chain": chain, "other": both("logits")})
    assert [operation for arm, operation in asked if arm == REFERENCE] == ["restart", "logits", "restart", "logits"]
    assert [arm for arm, _ in asked] == [REFERENCE] * 4 + [FP8] * 2


def test_an_answer_is_kept_for_whoever_asks_the_same_and_a_fresh_one_is_not(pair, asked):
    def kept():
        return (yield Ask(REFERENCE, "logits", seed=0)), (yield Ask(REFERENCE, "logits", seed=1))

    one, two = pair.run(kept), pair.run(kept)
    assert one == two
    assert pair.known(kept) == one
    assert asked == [(REFERENCE, "logits")] * 2
    pair.run(both("restart"))
    assert pair.known(both("restart")) is None
    assert len(asked) == 4


def test_an_error_is_its_own_questions_and_is_raised_where_it_asked(pair, asked):
    tries = []

    def repeats():
        try:
            yield Ask(FP8, "no_such_operation", fresh=True)
        except AttributeError as error:
            tries.append(error)
        yield Ask(FP8, "logits", fresh=True, seed=0)
        raise ArmError(R.ARM_RAISED, "in the end")

    errors = pair.gather({"one": repeats, "two": both("logits")})
    assert [error.headline for error in errors.values()] == ["in the end"]
    assert errors.keys() == {"one"}
    assert len(tries) == 1


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_ends_all_questions(pair, monkeypatch, stop):
    ended = []

    def waits():
        try:
            yield Ask(REFERENCE, "logits", fresh=True, seed=0)
            yield Ask(FP8, "logits", fresh=True, seed=0)
        finally:
            ended.append("one")

    def interrupt(*_, **__):
        raise stop

    monkeypatch.setattr(FakeProcess, "restart", interrupt)
    with pytest.raises(stop):
        pair.gather({"one": waits, "two": both("restart")})
    assert ended == ["one"]
    assert pair.gather({"again": both("logits")}) == {}, "the pair can be asked again"
