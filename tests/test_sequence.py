"""An arm that dies between two requests of one question: the question says so and never judges two processes as one."""

from __future__ import annotations

import pytest

from helpers.fakes import H100, H200, FakeProcess, install
from pytest_fp8 import ArmError, Case, Verdict
from pytest_fp8.arms.pair import PairArms
from pytest_fp8.arms.pool import ArmPool
from pytest_fp8.codes import R
from pytest_fp8.questions.asks import fp8_layers, ledgers_of, memory_of, numerics_of
from pytest_fp8.questions.checkpoints.carry import transfers_of
from pytest_fp8.questions.loss.question import loss_of
from pytest_fp8.questions.speed.evidence import timing_of
from pytest_fp8.questions.speed.timing import BlockTimer

CASE = Case("tiny", "torchao", "rowwise")
LARGE = Case("8b", "torchao", "rowwise", checkpoint_formats=("safetensors",), resume=False)
QUESTIONS = {
    "layers": lambda arms: fp8_layers(),
    "ledger": lambda arms: ledgers_of(arms.case.backend),
    "numerics": lambda arms: numerics_of(),
    "loss": lambda arms: loss_of(arms, True),
    "speedup": lambda arms: timing_of(arms, BlockTimer(arms), 0),
    "memory": lambda arms: memory_of(),
    "checkpoints": transfers_of,
}


@pytest.fixture
def asked(monkeypatch):
    """The arms in the order in which they answer; each with how many had answered when it was asked."""
    order, pending = [], {}
    send, real = FakeProcess.send, FakeProcess.request

    def note_sent(self, operation, **arguments):
        pending[self] = len(order)
        send(self, operation, **arguments)

    def note(self, operation, timeout=0, **arguments):
        if not self.alive:
            raise self.death()
        order.append((self.spec.case.id, pending.pop(self, len(order))))
        return real(self, operation, timeout, **arguments)

    monkeypatch.setattr(FakeProcess, "send", note_sent)
    monkeypatch.setattr(FakeProcess, "request", note)
    return order


def gathered(question, turns=False):
    """What one question says of fresh arms, or its error."""
    pool = ArmPool(H100 if turns else H200)
    try:
        pair = PairArms(LARGE if turns else CASE, pool, None)
        pair.start()
        return pair.run(lambda: QUESTIONS[question](pair))
    except ArmError as error:
        return error
    finally:
        pool.close()


def kill(monkeypatch, world, after, arm):
    """The arm dies when so many requests have been answered."""
    real = FakeProcess.request
    left = [after]

    def request(self, operation, timeout=0, **arguments):
        answer = real(self, operation, timeout, **arguments)
        left[0] -= 1
        if left[0] == 0:
            for process in world.processes:
                if process.alive and process.spec is not None and process.spec.case.id == arm:
                    process.alive = False
        return answer

    monkeypatch.setattr(FakeProcess, "request", request)


@pytest.mark.parametrize("question", QUESTIONS)
def test_an_arm_killed_before_any_request_but_its_first_ends_the_question(monkeypatch, asked, question):
    world = install(monkeypatch, H200)
    assert not isinstance(gathered(question), ArmError)
    order = list(asked)
    for before in range(1, len(order)):
        arm = order[before][0]
        with monkeypatch.context() as patch:
            kill(patch, world, before, arm)
            found = gathered(question)
        again = any(one == arm and since < before for one, since in order)
        assert isinstance(found, ArmError) == again, (before, order[before])
        if again:
            assert found.headline.endswith("died between two requests")


@pytest.mark.parametrize("question", ["loss", "speedup", "memory", "checkpoints"])
def test_of_arms_that_take_turns_a_change_of_residence_is_no_death(monkeypatch, asked, question):
    world = install(monkeypatch, H100)
    assert not isinstance(gathered(question, turns=True), ArmError)
    order = list(asked)
    for before in range(1, len(order)):
        arm, last = order[before][0], order[before - 1][0]
        assert order[before][1] == before, "arms that take turns are asked one after another"
        with monkeypatch.context() as patch:
            kill(patch, world, before, last)
            found = gathered(question, turns=True)
        assert isinstance(found, ArmError) == (arm == last), (before, order[before])


@pytest.mark.nightly_beyond(1)
@pytest.mark.slow
@pytest.mark.parametrize("before", [1, 3, 7, 9])
def test_a_real_arm_that_is_killed_between_two_requests_is_one_error_with_its_cause(monkeypatch, before):
    pytest.importorskip("torchao")
    import os
    import signal

    from helpers.arms import all_end
    from pytest_fp8.arms.process import ArmProcess
    from pytest_fp8.questions.checkpoints.check import check_checkpoints

    pool = ArmPool(None)
    pair = PairArms(Case("micro", "torchao", "tensorwise", emulated=True), pool, None)
    pair.start()
    real, count = ArmProcess.request, [before]

    def request(self, operation, timeout=300.0, **arguments):
        answer = real(self, operation, timeout, **arguments)
        count[0] -= 1
        if count[0] == 0:
            os.kill(self.pid, signal.SIGKILL)
            assert all_end(self.pid)
        return answer

    try:
        with monkeypatch.context() as patch:
            patch.setattr(ArmProcess, "request", request)
            with pytest.raises(ArmError, match="died of SIGKILL") as error:
                pair.run(lambda: transfers_of(pair))
        assert error.value.code is R.ARM_DIED
        assert "out-of-memory killer" in error.value.cause
        assert check_checkpoints(pair.run(lambda: transfers_of(pair))).verdict is Verdict.PASS
    finally:
        pool.close()
