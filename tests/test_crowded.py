"""Arms that were built together and do not fit the GPU together after all: they take turns, and nothing is lost."""

from __future__ import annotations

import sys

import pytest

from helpers.fakes import H100, H200, FakeProcess, install, timed
from pytest_fp8 import ArmError, Case
from pytest_fp8.arms.arm import Arm
from pytest_fp8.arms.environment import ArmEnvironment
from pytest_fp8.arms.pair import PairArms
from pytest_fp8.arms.pool import ArmPool
from pytest_fp8.arms.room import Room
from pytest_fp8.arms.spec import ArmSpec
from pytest_fp8.compare.session import Model, compare_in
from pytest_fp8.gpu import Conditions
from pytest_fp8.questions.checkpoints.carry import transfers_of
from pytest_fp8.questions.layers.evidence import fp8_layers, reference_layers
from pytest_fp8.questions.numerics.evidence import numerics_of
from pytest_fp8.questions.speed.evidence import judged_busy, timing_for_baseline, timing_of
from pytest_fp8.questions.speed.timing import BlockTimer
from pytest_fp8.verdicts import Verdict

GIB = 2**30
CASE = Case("8b16", "torchao", "tensorwise", batch=4, gpus=2, parallel="fsdp2")


@pytest.fixture
def world(monkeypatch):
    world = install(monkeypatch, H200)
    monkeypatch.setattr("pytest_fp8.arms.pool.RankedProcess", lambda ranks, *how: FakeProcess(*how[:3]))
    return world


def alive(world):
    return [process for process in world.processes if process.alive and process.spec is not None]


@pytest.fixture
def pair(world):
    pool = ArmPool(H200)
    pair = PairArms(Case("8b", "torchao", "tensorwise"), pool, None)
    pair.start()
    assert len(alive(world)) == 2
    yield pair
    pool.close()


def beside_another(monkeypatch, world, operation, fails):
    """``operation`` of an arm for which ``fails`` says so ends in this while another arm is alive."""
    real = getattr(FakeProcess, operation)

    def asked(self, **arguments):
        if len(alive(world)) > 1 and fails(self):
            return crowded(arguments)
        return real(self, **arguments)

    def crowded(arguments):
        if operation == "blocks":
            return timed([100.0] * arguments["count"], retries=arguments["count"] * arguments["steps"])
        raise ArmError("out of memory", "no room beside the other")

    monkeypatch.setattr(FakeProcess, operation, asked)


@pytest.mark.parametrize(
    ("what", "gpu", "steps", "held", "crowded"),
    [
        ("Accelerate's float32 weights, 16 layers of 8B", H100, (47.6, 42.2), 27.2, True),
        ("the same on an H200", H200, (47.6, 42.2), 27.2, False),
        ("plain FSDP2", H100, (35.9, 33.1), 25.2, False),
        ("the larger one is the FP8 arm", H100, (42.2, 47.6), 27.2, True),
        ("8B with 8192 tokens", H200, (83.1, 72.1), 44.9, False),
        ("8B in Transformer Engine", H200, (64.1, 79.9), 44.9, False),
    ],
)
def test_a_step_must_fit_beside_what_the_other_arm_holds(what, gpu, steps, held, crowded):
    keys = ("bf16", "fp8")
    said = {
        key: {"memory": {"step": step * GIB, "peak": 1.2 * step * GIB, "allocated": held * GIB}}
        for key, step in zip(keys, steps, strict=True)
    }
    arms = [Arm(key, ArmSpec(CASE, "cuda"), pool=None) for key in keys]
    assert Room(gpu, said).crowded(arms) is crowded, what


def test_a_cpu_and_arms_that_said_nothing_are_not_crowded():
    arms = [Arm(key, ArmSpec(CASE, "cuda"), pool=None) for key in ("bf16", "fp8")]
    assert not Room(None, {}).crowded(arms)
    assert not Room(H100, {}).crowded(arms)


@pytest.mark.parametrize("of_the_reference", [True, False])
def test_a_pair_whose_builds_say_that_it_is_crowded_takes_turns_and_keeps_the_reference(
    world, monkeypatch, of_the_reference
):
    receive = FakeProcess.receive

    def receives(self, timeout=0):
        step = 60 if self.is_fp8 is not of_the_reference else 30
        return {**receive(self, timeout), "memory": {"step": step * GIB, "peak": step * GIB, "allocated": 25 * GIB}}

    monkeypatch.setattr(FakeProcess, "receive", receives)
    pool = ArmPool(H100)
    pair = PairArms(CASE, pool, None)
    pair.start()
    assert pool.takes_turns(pair.fp8)
    assert [process.spec.case.id for process in alive(world)] == [CASE.reference().id]
    assert world.built == [CASE.reference().id, CASE.id][: 1 if of_the_reference else 2], "FP8's only where that tells"
    built = list(world.built)
    pair.start()
    assert world.built == built, "known from now on"
    pool.close()


def test_blocks_in_which_memory_ran_out_are_taken_again_by_turns(pair, world, monkeypatch):
    beside_another(monkeypatch, world, "blocks", lambda process: not process.is_fp8)
    timer = BlockTimer(pair)
    timing = timing_of(pair, timer, 0)
    assert pair.takes_turns
    assert [len(timing.bf16[0]), len(timing.fp8[0])] == [12, 12]
    assert 100.0 not in timing.bf16[0]
    assert [turn.arm for turn in timing.turns] == ["BF16", "FP8", "BF16"], "none of the first attempt's"
    assert len(timer.beside.states) == 3


def test_memory_that_runs_out_in_turns_is_the_models_own(pair, world, monkeypatch):
    monkeypatch.setattr(FakeProcess, "blocks", lambda self, count, steps, dropped: timed([100.0] * count, retries=99))
    timing = timing_of(pair, BlockTimer(pair), 0)
    assert pair.takes_turns
    assert {turn.retries for turn in timing.turns} == {99}, "told in the recording"


@pytest.mark.parametrize("step", [100.0, 400.0])
def test_a_cache_that_is_given_back_now_and_then_separates_nobody(pair, world, monkeypatch, step):
    """Of a large model a block is one step, and a turn two."""
    asked = []

    def blocks(self, count, steps, dropped):
        asked.append(self)
        return timed([step] * count, retries=int(len(asked) in (5, 12)))

    monkeypatch.setattr(FakeProcess, "blocks", blocks)
    timing = timing_of(pair, BlockTimer(pair), 0)
    assert not pair.takes_turns
    assert sum(turn.retries for turn in timing.turns) == 2


def test_memory_that_a_process_of_others_has_is_told_as_theirs(pair, world, monkeypatch):
    world.strangers = (4242,)
    beside_another(monkeypatch, world, "blocks", lambda process: True)
    timing = timing_of(pair, BlockTimer(pair), 0)
    assert timing.strangers == [4242]
    assert not pair.takes_turns


def test_pairs_that_were_timed_side_by_side_are_not_mixed_with_pairs_by_turns(pair, world, monkeypatch):
    world.busy, world.kernels_alone = 60.0, True
    timer = BlockTimer(pair)
    timer.wants_busy = True
    beside_another(monkeypatch, world, "blocks", lambda process: len(timer.other) == 2)
    evidence = timing_for_baseline(pair, timer, 4, lambda evidence: True)
    assert pair.takes_turns
    assert len(evidence.fp8) == len(evidence.fp8_busy) == 4
    assert [turn.arm for turn in evidence.turns] == ["BF16", "FP8", "BF16"] * 4
    assert timer.recording()["order"] == "turns"


def test_a_pair_that_does_not_fit_when_it_is_built_afresh_is_not_timed_in_vain(pair, monkeypatch):
    timer, real, own, asked = BlockTimer(pair), pair.renew, FakeProcess.blocks, []
    monkeypatch.setattr(FakeProcess, "blocks", lambda self, **how: asked.append(self.pid) or own(self, **how))
    timer.measure(1, 4)

    def renew():
        real()
        if not pair.takes_turns:
            pair.pool.make_room(pair.reference, pair.other)

    monkeypatch.setattr(pair, "renew", renew)
    asked.clear()
    timer.measure(2, 4)
    assert pair.takes_turns
    assert len(timer.other) == 2
    assert len(asked) == 6, "three turns of each pair, all of which count"


def test_memory_that_runs_out_after_the_blocks_has_them_taken_anew(pair, world, monkeypatch):
    """As on two H100s: blocks went on beside the other arm, and the next question had no room."""
    world.busy, world.kernels_alone = 60.0, True
    beside_another(monkeypatch, world, "layers", lambda process: True)
    timer = BlockTimer(pair)
    timer.waited = True
    evidence = timing_of(pair, timer, 0)
    assert [turn.arm for turn in evidence.turns] == ["BF16", "FP8", "BF16"], "none of the blocks taken side by side"
    assert judged_busy(evidence), "busy times were asked again, too"


@pytest.mark.parametrize("operation", ["layers", "busy"])
def test_blocks_whose_busy_times_had_no_room_beside_arms_built_ahead_are_taken_anew(world, monkeypatch, operation):
    world.busy, world.kernels_alone = 60.0, True
    pool = ArmPool(H200)
    pairs = [PairArms(Case("1b", "torchao", recipe), pool, None) for recipe in ("tensorwise", "rowwise")]
    pairs[0].start(ahead=[pairs[1].fp8])
    pool.wait_for_builds()
    real = getattr(FakeProcess, operation)

    def asked(self, **arguments):
        if len(alive(world)) > 2:
            raise ArmError("out of memory", "no room beside what was built ahead")
        return real(self, **arguments)

    monkeypatch.setattr(FakeProcess, operation, asked)
    timer = BlockTimer(pairs[0])
    timer.wants_busy = True
    evidence = timing_for_baseline(pairs[0], timer, 2, lambda evidence: True)
    assert not pairs[0].takes_turns
    assert [len(each) > 0 for each in evidence.fp8_busy] == [True, True]
    assert len(evidence.turns) == 2 * len(evidence.turns[:17]), "none of the first attempt's"
    pool.close()


def test_a_disturbance_before_memory_runs_out_is_no_part_of_what_counts(pair, world, monkeypatch):
    asked = []

    def conditions(self):
        asked.append(self)
        return Conditions(1900, ("hot",) if len(asked) <= 9 else ())

    monkeypatch.setattr(PairArms, "conditions", conditions)
    beside_another(monkeypatch, world, "blocks", lambda process: len(asked) > 8)
    timing = timing_of(pair, BlockTimer(pair), 0)
    assert pair.takes_turns
    assert (list(timing.throttles), len(timing.turns)) == ([], 3)


@pytest.mark.parametrize("who", ["bf16", "torchao"])
def test_a_question_without_room_is_asked_once_more_by_turns(pair, world, monkeypatch, who):
    beside_another(monkeypatch, world, "numerics", lambda process: process.spec.case.backend == who)
    first = alive(world)
    assert numerics_of(pair).fp8 is not None
    assert pair.takes_turns
    assert not any(process.alive for process in first), "an arm that broke off in a step is not asked again"
    assert len(alive(world)) == 1


def test_what_was_answered_before_stays(pair, world, monkeypatch):
    timer = BlockTimer(pair)
    timing_of(pair, timer, 0)
    before = fp8_layers(pair), reference_layers(pair)
    recorded = timer.recording()
    beside_another(monkeypatch, world, "numerics", lambda process: True)
    numerics_of(pair)
    monkeypatch.setattr(FakeProcess, "layers", None)
    assert (fp8_layers(pair), reference_layers(pair)) == before
    assert timer.recording() == recorded
    assert recorded["order"] == "abba"


def test_memory_that_runs_out_for_an_arm_alone_ends_the_question(pair, world, monkeypatch):
    def asked(self, **arguments):
        raise ArmError("out of memory", "no room at all")

    monkeypatch.setattr(FakeProcess, "numerics", asked)
    with pytest.raises(ArmError, match="no room at all"):
        numerics_of(pair)
    assert pair.takes_turns
    built = len(world.built)
    with pytest.raises(ArmError, match="no room at all"):
        numerics_of(pair)
    assert len(world.built) <= built + 2


def test_arms_built_ahead_make_room_before_a_pair_is_separated(world, monkeypatch):
    pool = ArmPool(H200)
    pairs = [PairArms(Case("1b", "torchao", recipe), pool, None) for recipe in ("tensorwise", "rowwise")]
    real = FakeProcess.numerics

    def numerics(self, **arguments):
        if len(alive(world)) > 2:
            raise ArmError("out of memory", "no room beside what was built ahead")
        return real(self, **arguments)

    monkeypatch.setattr(FakeProcess, "numerics", numerics)
    pairs[0].start(ahead=[pairs[1].fp8])
    pool.wait_for_builds()
    assert len(alive(world)) == 3
    numerics_of(pairs[0])
    assert not any(pool.takes_turns(pair.fp8) for pair in pairs)
    pairs[0].start(ahead=[pairs[1].fp8])
    pool.wait_for_builds()
    assert len(alive(world)) == 2, "nothing more is built beside them"
    pool.close()


@pytest.mark.parametrize("fits_alone", [True, False])
def test_the_reference_on_one_gpu_has_the_pairs_memory_too(world, monkeypatch, fits_alone):
    """For checkpoints of a case of two GPUs."""
    pool = ArmPool(H200)
    pair = PairArms(Case("tiny", "torchao", "tensorwise", gpus=2, parallel="fsdp2"), pool, None)
    pair.start()
    real = FakeProcess.receive

    def receive(self, timeout=0):
        if self.asked is None and self.spec.case.gpus == 1 and (len(alive(world)) > 2 or not fits_alone):
            raise ArmError("out of memory", "one GPU does not hold it")
        return real(self, timeout)

    monkeypatch.setattr(FakeProcess, "receive", receive)
    if fits_alone:
        assert len(transfers_of(pair)) == 6
    else:
        with pytest.raises(ArmError, match="one GPU does not hold it"):
            transfers_of(pair)
    pool.close()


@pytest.mark.parametrize("operation", ["blocks", "layers"])
@pytest.mark.parametrize("within_a_gate", [True, False])
def test_sides_of_a_comparison_that_are_crowded_take_turns_and_the_case_s_pair_does_not(
    pair, world, monkeypatch, within_a_gate, operation
):
    sides = tuple(ArmEnvironment(name, sys.executable, ("/x",), {}, "") for name in ("base", "head"))
    beside_another(monkeypatch, world, operation, lambda process: process.side == "base")

    def compare():
        return compare_in(pair.pool, pair.case, Model(), sides, 0.01)

    found = pair.once("base", compare) if within_a_gate else compare()
    assert found.decision.verdict is Verdict.PASS
    assert not pair.takes_turns


@pytest.mark.parametrize("kind", ["raised", "died", "hung"])
def test_no_other_error_is_asked_again(pair, world, monkeypatch, kind):
    asked = []

    def fails(self, **arguments):
        asked.append(self)
        raise ArmError(kind, "something else")

    monkeypatch.setattr(FakeProcess, "numerics", fails)
    with pytest.raises(ArmError, match="something else"):
        numerics_of(pair)
    assert not pair.takes_turns
    assert len(asked) == 1


def test_on_a_cpu_nothing_takes_turns(world, monkeypatch):
    pool = ArmPool(None)
    pair = PairArms(Case("micro", "torchao", "tensorwise", emulated=True), pool, None)
    pair.start()
    beside_another(monkeypatch, world, "numerics", lambda process: True)
    with pytest.raises(ArmError, match="no room"):
        numerics_of(pair)
    assert not pair.takes_turns
    pool.close()


SUITE = """
    import pytest
    from pytest_fp8 import Case

    pytestmark = pytest.mark.fp8(cases=[Case("1b", "torchao", "tensorwise")])

    def test_layers(fp8_pair):
        fp8_pair.assert_layers()

    def test_numerics(fp8_pair):
        fp8_pair.assert_numerics()

    def test_loss(fp8_pair):
        fp8_pair.assert_loss()

    def test_memory(fp8_pair):
        fp8_pair.memory()

    def test_speedup(fp8_pair):
        fp8_pair.assert_faster()
"""
OPERATIONS = ("blocks", "layers", "ledger", "numerics", "curve", "memory")


@pytest.mark.parametrize("one_by_one", [False, True], ids=["all", "alone"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_session_whose_arms_turn_out_crowded_answers_all_the_same(pytester, monkeypatch, operation, one_by_one):
    world = install(monkeypatch, H200)
    pytester.makepyfile(SUITE)
    beside_another(monkeypatch, world, operation, lambda process: process.is_fp8)
    chosen = {"numerics": "test_numerics", "curve": "test_loss", "memory": "test_memory"}.get(operation, "test_layers")
    result = pytester.runpytest("--fp8-gpu=h200", "--fp8-undecided=warn", *(["-k", chosen] if one_by_one else []))
    assert result.parseoutcomes().get("failed", 0) == result.parseoutcomes().get("errors", 0) == 0
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        ["1b-torchao-tensorwise and its reference did not fit this GPU together: they took turns*"]
    )
    assert not alive(world)
