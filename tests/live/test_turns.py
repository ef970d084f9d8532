"""Arms that die between two requests of one question, and arms that were built together and do not fit the GPU together
after all: the question says so and never judges two processes as one, or the arms take turns and nothing is lost."""

from __future__ import annotations

import pytest

from helpers.fakes import H100, H200, FakeProcess, built, install, timed
from pytest_fp8 import ArmError, Case, Verdict, Workload
from pytest_fp8.arms.environment import ArmEnvironment
from pytest_fp8.arms.pair import PairArms
from pytest_fp8.arms.pool import ArmPool
from pytest_fp8.codes import R
from pytest_fp8.compare import compare as compare_sides
from pytest_fp8.questions.asks import fp8_layers, ledgers_of, memory_of, numerics_of
from pytest_fp8.questions.checkpoints.carry import transfers_of
from pytest_fp8.questions.loss.check import loss_of
from pytest_fp8.questions.speed.evidence import timing_for_baseline, timing_of
from pytest_fp8.questions.speed.timing import BlockTimer


def beside_another(monkeypatch, world, operation, fails):
    """``operation`` of an arm for which ``fails`` says so ends in this while another arm is alive."""
    real = getattr(FakeProcess, operation)

    def asked(self, **arguments):
        if len(built(world)) > 1 and fails(self):
            return crowded(arguments)
        return real(self, **arguments)

    def crowded(arguments):
        if operation == "blocks":
            return timed([100.0] * arguments["count"], retries=arguments["count"] * arguments["steps"])
        raise ArmError(R.OUT_OF_MEMORY, "no room beside the other")

    monkeypatch.setattr(FakeProcess, operation, asked)


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


@pytest.mark.slow
def test_a_real_arm_that_is_killed_between_two_requests_is_one_error_with_its_cause(monkeypatch):
    pytest.importorskip("torchao")
    import os
    import signal

    from helpers.arms import CASE as OWN
    from helpers.arms import all_end, make_batch, make_model, square
    from pytest_fp8.arms.process import ArmProcess
    from pytest_fp8.questions.checkpoints.check import check_checkpoints

    pool = ArmPool(None)
    pair = PairArms(OWN, pool, Workload(make_model, make_batch, square).ship("a test"), "its identity")
    pair.start()
    real, count = ArmProcess.request, [1]

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


# -- arms that do not fit together ------------------------------------------------------------------------------------


@pytest.fixture
def world(monkeypatch):
    return install(monkeypatch, H200)


@pytest.fixture
def pair(world):
    """Both arms of a case, built together."""
    pool = ArmPool(H200)
    pair = PairArms(Case("8b", "torchao", "tensorwise"), pool, None)
    pair.start()
    assert len(built(world)) == 2
    yield pair
    pool.close()


@pytest.mark.parametrize("who", ["bf16", "torchao"])
def test_a_question_without_room_is_asked_once_more_by_turns(pair, world, monkeypatch, who):
    beside_another(monkeypatch, world, "numerics", lambda process: process.spec.case.backend == who)
    first = built(world)
    assert pair.run(numerics_of).fp8 is not None
    assert pair.takes_turns
    assert not any(process.alive for process in first), "an arm that broke off in a step is not asked again"
    assert len(built(world)) == 1


def test_memory_that_runs_out_for_an_arm_alone_ends_the_question(pair, world, monkeypatch):
    def asked(self, **arguments):
        raise ArmError(R.OUT_OF_MEMORY, "no room at all")

    monkeypatch.setattr(FakeProcess, "numerics", asked)
    with pytest.raises(ArmError, match="no room at all"):
        pair.run(numerics_of)
    assert pair.takes_turns
    before = len(world.built)
    with pytest.raises(ArmError, match="no room at all"):
        pair.run(numerics_of)
    assert len(world.built) <= before + 2


@pytest.mark.parametrize("operation", ["blocks", "layers"])
@pytest.mark.parametrize("within_a_gate", [True, False])
def test_sides_of_a_comparison_that_are_crowded_take_turns_and_the_case_s_pair_does_not(
    pair, world, monkeypatch, within_a_gate, operation
):
    sides = tuple(ArmEnvironment(name, ("/x",)) for name in ("base", "head"))
    beside_another(monkeypatch, world, operation, lambda process: process.side == "base")

    def compare():
        return compare_sides(pair.pool, pair.case, (None, ""), sides)

    found = pair.once("base", compare) if within_a_gate else compare()
    assert found.decision.verdict is Verdict.PASS
    assert not pair.takes_turns


@pytest.mark.parametrize("code", [R.ARM_RAISED, R.ARM_DIED, R.ARM_HUNG])
def test_no_other_error_is_asked_again(pair, world, monkeypatch, code):
    asked = []

    def fails(self, **arguments):
        asked.append(self)
        raise ArmError(code, "something else")

    monkeypatch.setattr(FakeProcess, "numerics", fails)
    with pytest.raises(ArmError, match="something else"):
        pair.run(numerics_of)
    assert not pair.takes_turns
    assert len(asked) == 1


def test_on_a_cpu_nothing_takes_turns(world, monkeypatch):
    pool = ArmPool(None)
    pair = PairArms(Case("micro", "torchao", "tensorwise", emulated=True), pool, None)
    pair.start()
    beside_another(monkeypatch, world, "numerics", lambda process: True)
    with pytest.raises(ArmError, match="no room"):
        pair.run(numerics_of)
    assert not pair.takes_turns
    pool.close()


# -- blocks in which the memory of a GPU runs out -----------------------------------------------------------------


@pytest.mark.parametrize("operation", ["blocks", "layers"])
def test_a_pair_that_runs_out_of_memory_is_taken_again_by_turns(pair, world, monkeypatch, operation):
    """As on two H100s: blocks went on beside the other arm, and the next question had no room."""
    world.busy, world.kernels_alone = 60.0, True
    beside_another(monkeypatch, world, operation, lambda process: process.is_fp8)
    timer = BlockTimer(pair, takes_busy=True)
    timing = pair.run(lambda: timing_of(pair, timer, 0))
    assert pair.takes_turns
    assert [len(timing.bf16[0]), len(timing.fp8[0])] == [12, 12]
    assert [turn.arm for turn in timing.beside.turns] == ["BF16", "FP8", "BF16"], "none of the first attempt's"
    assert len(timer.beside.states) == 3
    assert timing.busy_ratios()


@pytest.mark.parametrize("step", [100.0, 400.0])
def test_a_cache_that_is_given_back_now_and_then_separates_nobody(pair, world, monkeypatch, step):
    """Of a large model a block is one step, and a turn two."""
    asked = []

    def blocks(self, count, steps, dropped):
        asked.append(self)
        return timed([step] * count, retries=int(len(asked) in (5, 12)))

    monkeypatch.setattr(FakeProcess, "blocks", blocks)
    timing = pair.run(lambda: timing_of(pair, BlockTimer(pair), 0))
    assert not pair.takes_turns
    assert sum(turn.retries for turn in timing.beside.turns) == 2


def test_memory_that_a_process_of_others_has_is_told_as_theirs(pair, world, monkeypatch):
    world.strangers = (4242,)
    beside_another(monkeypatch, world, "blocks", lambda process: True)
    timing = pair.run(lambda: timing_of(pair, BlockTimer(pair), 0))
    assert (timing.beside.strangers, pair.takes_turns) == ([4242], False)


def test_pairs_that_were_timed_side_by_side_are_not_mixed_with_pairs_by_turns(pair, world, monkeypatch):
    world.busy, world.kernels_alone = 60.0, True
    timer = BlockTimer(pair, takes_busy=True)
    beside_another(monkeypatch, world, "blocks", lambda process: len(timer.pairs) == 2)
    evidence = pair.run(lambda: timing_for_baseline(pair, timer, 4))
    assert pair.takes_turns
    assert len(evidence.fp8) == len(evidence.fp8_busy) == 4
    assert [turn.arm for turn in evidence.beside.turns] == ["BF16", "FP8", "BF16"] * 4
    assert timer.recording()["order"] == "turns"
