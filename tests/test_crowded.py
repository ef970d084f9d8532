"""Arms that were built together and do not fit the GPU together after all: they take turns, and nothing is lost."""

from __future__ import annotations

import pytest

from helpers.crowded import alive, beside_another, pair_of_8b, several_gpus
from helpers.fakes import FakeProcess, timed
from pytest_fp8 import ArmError, Case
from pytest_fp8.arms.environment import ArmEnvironment
from pytest_fp8.arms.pair import PairArms
from pytest_fp8.arms.pool import ArmPool
from pytest_fp8.codes import R
from pytest_fp8.compare.session import Model
from pytest_fp8.compare.session import compare as compare_sides
from pytest_fp8.questions.asks import numerics_of
from pytest_fp8.questions.speed.evidence import timing_for_baseline, timing_of
from pytest_fp8.questions.speed.timing import BlockTimer
from pytest_fp8.verdicts import Verdict


@pytest.fixture
def world(monkeypatch):
    return several_gpus(monkeypatch)


@pytest.fixture
def pair(world):
    with pair_of_8b(world) as pair:
        yield pair


@pytest.mark.parametrize("who", ["bf16", "torchao"])
def test_a_question_without_room_is_asked_once_more_by_turns(pair, world, monkeypatch, who):
    beside_another(monkeypatch, world, "numerics", lambda process: process.spec.case.backend == who)
    first = alive(world)
    assert pair.run(numerics_of).fp8 is not None
    assert pair.takes_turns
    assert not any(process.alive for process in first), "an arm that broke off in a step is not asked again"
    assert len(alive(world)) == 1


def test_memory_that_runs_out_for_an_arm_alone_ends_the_question(pair, world, monkeypatch):
    def asked(self, **arguments):
        raise ArmError(R.OUT_OF_MEMORY, "no room at all")

    monkeypatch.setattr(FakeProcess, "numerics", asked)
    with pytest.raises(ArmError, match="no room at all"):
        pair.run(numerics_of)
    assert pair.takes_turns
    built = len(world.built)
    with pytest.raises(ArmError, match="no room at all"):
        pair.run(numerics_of)
    assert len(world.built) <= built + 2


@pytest.mark.parametrize("operation", ["blocks", "layers"])
@pytest.mark.parametrize("within_a_gate", [True, False])
def test_sides_of_a_comparison_that_are_crowded_take_turns_and_the_case_s_pair_does_not(
    pair, world, monkeypatch, within_a_gate, operation
):
    sides = tuple(ArmEnvironment(name, ("/x",)) for name in ("base", "head"))
    beside_another(monkeypatch, world, operation, lambda process: process.side == "base")

    def compare():
        return compare_sides(pair.pool, pair.case, Model(), sides, 0.01)

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
