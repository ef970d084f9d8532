"""Blocks in which the memory of a GPU runs out: which are taken again, by turns, and what counts of them."""

from __future__ import annotations

import pytest

from helpers.crowded import beside_another, pair_of_8b, several_gpus
from helpers.fakes import FakeProcess, timed
from pytest_fp8.arms.pair import PairArms
from pytest_fp8.gpu import Conditions
from pytest_fp8.questions.speed.evidence import busy_ratios, timing_for_baseline, timing_of
from pytest_fp8.questions.speed.timing import BlockTimer


@pytest.fixture
def world(monkeypatch):
    return several_gpus(monkeypatch)


@pytest.fixture
def pair(world):
    with pair_of_8b(world) as pair:
        yield pair


def test_blocks_in_which_memory_ran_out_are_taken_again_by_turns(pair, world, monkeypatch):
    beside_another(monkeypatch, world, "blocks", lambda process: not process.is_fp8)
    timer = BlockTimer(pair)
    timing = pair.run(lambda: timing_of(pair, timer, 0))
    assert pair.takes_turns
    assert [len(timing.bf16[0]), len(timing.fp8[0])] == [12, 12]
    assert 100.0 not in timing.bf16[0]
    assert [turn.arm for turn in timing.turns] == ["BF16", "FP8", "BF16"], "none of the first attempt's"
    assert len(timer.beside.states) == 3


def test_memory_that_runs_out_in_turns_is_the_models_own(pair, world, monkeypatch):
    monkeypatch.setattr(FakeProcess, "blocks", lambda self, count, steps, dropped: timed([100.0] * count, retries=99))
    timing = pair.run(lambda: timing_of(pair, BlockTimer(pair), 0))
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
    timing = pair.run(lambda: timing_of(pair, BlockTimer(pair), 0))
    assert not pair.takes_turns
    assert sum(turn.retries for turn in timing.turns) == 2


def test_memory_that_a_process_of_others_has_is_told_as_theirs(pair, world, monkeypatch):
    world.strangers = (4242,)
    beside_another(monkeypatch, world, "blocks", lambda process: True)
    timing = pair.run(lambda: timing_of(pair, BlockTimer(pair), 0))
    assert timing.strangers == [4242]
    assert not pair.takes_turns


def test_pairs_that_were_timed_side_by_side_are_not_mixed_with_pairs_by_turns(pair, world, monkeypatch):
    world.busy, world.kernels_alone = 60.0, True
    timer = BlockTimer(pair, takes_busy=True)
    beside_another(monkeypatch, world, "blocks", lambda process: len(timer.other) == 2)
    evidence = pair.run(lambda: timing_for_baseline(pair, timer, 4, lambda evidence: True))
    assert pair.takes_turns
    assert len(evidence.fp8) == len(evidence.fp8_busy) == 4
    assert [turn.arm for turn in evidence.turns] == ["BF16", "FP8", "BF16"] * 4
    assert timer.recording()["order"] == "turns"


def test_a_pair_that_does_not_fit_when_it_is_built_afresh_is_not_timed_in_vain(pair, monkeypatch):
    timer, real, own, asked = BlockTimer(pair), pair.renew, FakeProcess.blocks, []
    monkeypatch.setattr(FakeProcess, "blocks", lambda self, **how: asked.append(self.pid) or own(self, **how))
    pair.run(lambda: timer.measure(1, 4))

    def renew():
        real()
        if not pair.takes_turns:
            pair.pool.separate(*pair.pair)
            pair.pool.renew(*pair.pair)

    monkeypatch.setattr(pair, "renew", renew)
    asked.clear()
    pair.run(lambda: timer.measure(2, 4))
    assert pair.takes_turns
    assert len(timer.other) == 2
    assert len(asked) == 6, "three turns of each pair, all of which count"


def test_memory_that_runs_out_after_the_blocks_has_them_taken_anew(pair, world, monkeypatch):
    """As on two H100s: blocks went on beside the other arm, and the next question had no room."""
    world.busy, world.kernels_alone = 60.0, True
    beside_another(monkeypatch, world, "layers", lambda process: True)
    timer = BlockTimer(pair, takes_busy=True)
    evidence = pair.run(lambda: timing_of(pair, timer, 0))
    assert [turn.arm for turn in evidence.turns] == ["BF16", "FP8", "BF16"], "none of the blocks taken side by side"
    assert busy_ratios(evidence), "busy times were asked again, too"


def test_a_disturbance_before_memory_runs_out_is_no_part_of_what_counts(pair, world, monkeypatch):
    asked = []

    def conditions(self):
        asked.append(self)
        return Conditions(1900, ("hot",) if len(asked) <= 9 else ())

    monkeypatch.setattr(PairArms, "conditions", conditions)
    beside_another(monkeypatch, world, "blocks", lambda process: len(asked) > 8)
    timing = pair.run(lambda: timing_of(pair, BlockTimer(pair), 0))
    assert pair.takes_turns
    assert (list(timing.throttles), len(timing.turns)) == ([], 3)
