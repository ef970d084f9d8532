"""What the first blocks of a case settle, and which pairs take all blocks at once."""

from __future__ import annotations

import math

import pytest

from helpers.fakes import H200, FakeProcess, install, timed
from helpers.power_limited import PowerLimited, pool_of_limited_arms
from pytest_fp8 import Case
from pytest_fp8.arms.pair import PairArms
from pytest_fp8.arms.pool import ArmPool
from pytest_fp8.questions.speed.evidence import timing_of
from pytest_fp8.questions.speed.question import SpeedQuestion
from pytest_fp8.questions.speed.timing import BlockTimer
from pytest_fp8.rules.speed import BASELINE_BLOCKS
from pytest_fp8.rules.variance import MEASURED


@pytest.fixture
def pool(monkeypatch):
    with pool_of_limited_arms(monkeypatch) as made:
        yield made


def first_pair(pool, model, settled):
    """What the first pair of a case of this model takes, where its first blocks settle it or not."""
    arms = PairArms(Case(model, "torchao", "tensorwise"), pool, None)
    arms.start()
    return timing_of(arms, BlockTimer(arms, settled), 0)


class ReferenceDrifts(FakeProcess):
    """The reference's first block of each turn is faster by 3 %, unless its first second does not count."""

    def blocks(self, count, steps, dropped):
        base, drifts = (280.0, 0.0) if self.is_fp8 else (370.0, 0.03)
        late = dropped * base > 1000
        times = [base * (1.0 if late or index else 1 - drifts) for index in range(count)]
        noisy = [float(time * math.exp(self.noise.normal(0, 0.001))) for time in times]
        return timed(noisy)


@pytest.mark.parametrize("settled", [True, False, None])
def test_a_reference_whose_turns_are_unsteady_is_seen_in_the_first_blocks_too(pool, monkeypatch, settled):
    monkeypatch.setattr("pytest_fp8.arms.pool.ArmProcess", ReferenceDrifts)
    timing = first_pair(pool, "8b", None if settled is None else Asked(settled))
    assert timing.bf16[0] == pytest.approx([370.0] * (6 if settled else 12), rel=0.005)


class Asked:
    """Whether the first blocks settle it; notes what was asked of the arms before."""

    def __init__(self, answer):
        self.answer, self.seen = answer, []

    def __call__(self, reference, other):
        self.seen.append((list(reference), list(other)))
        return self.answer


@pytest.mark.parametrize(("answer", "blocks"), [(True, 3), (False, 6)])
def test_the_first_pair_goes_on_where_its_first_blocks_settle_nothing(pool, answer, blocks):
    asked = Asked(answer)
    timing = first_pair(pool, "1b", asked)
    assert [len(timing.bf16[0]), len(timing.fp8[0])] == [2 * blocks, 2 * blocks]
    [(reference, other)] = asked.seen
    assert (reference, other) == (timing.bf16[0][:6], timing.fp8[0][:6])


@pytest.mark.parametrize(("answer", "blocks"), [(True, 3), (False, 6)])
def test_what_is_asked_of_the_first_blocks_is_asked_of_the_longer_turns(pool, answer, blocks):
    asked = Asked(answer)
    timing = first_pair(pool, "8b", asked)
    assert len(timing.fp8[0]) == 2 * blocks
    assert timing.fp8[0] == pytest.approx([280.0] * 2 * blocks, rel=0.01)
    assert len(asked.seen) == 1
    assert asked.seen[0][0] == pytest.approx([370.0] * 6, rel=0.01)


def test_turns_that_only_all_blocks_show_to_be_unsteady_are_taken_again_as_a_whole(pool, monkeypatch):
    seen = []

    def late(reference, other):
        seen.append(len(other))
        return len(other) > 6

    monkeypatch.setattr("pytest_fp8.questions.speed.timing.unsteady_pair", late)
    timing = first_pair(pool, "8b", Asked(False))
    assert seen == [6, 12]
    assert timing.fp8[0] == pytest.approx([280.0] * 12, rel=0.01)


@pytest.mark.parametrize(("metric", "blocks"), [("speedup", 3), ("busy_speedup", 6)])
def test_a_case_that_is_judged_by_busy_times_takes_all_blocks(monkeypatch, metric, blocks):
    install(monkeypatch, H200, speedup=1.2)
    pool = ArmPool(H200)
    arms = PairArms(Case("1b", "torchao", "tensorwise"), pool, None)
    arms.start()
    session = [[math.log(1.2)] * 8] * 2

    def history(name):
        return [session] if name in (metric, "speedup") else []

    question = SpeedQuestion(arms, metric, history, MEASURED, "file", 30)
    assert {len(times) for times in question.first_timing().fp8} == {2 * blocks}
    pool.close()


def test_later_pairs_and_those_of_a_baseline_take_all_blocks_at_once(pool):
    arms = PairArms(Case("1b", "torchao", "tensorwise"), pool, None)
    arms.start()
    found = timing_of(arms, BlockTimer(arms, Asked(True)), 1)
    assert [len(times) for times in found.fp8] == [6, 12]
    arms = PairArms(Case("1b", "torchao", "rowwise"), pool, None)
    arms.start()
    question = SpeedQuestion(arms, "", lambda _: [], MEASURED, "file", 30, processes=2)
    assert {len(times) for times in question.first_timing().fp8} == {2 * BASELINE_BLOCKS}


def test_a_further_case_of_the_reference_begins_with_the_longer_turns(pool):
    for recipe in ("tensorwise", "rowwise"):
        arms = PairArms(Case("8b", "torchao", recipe), pool, None)
        arms.start()
        before = len(PowerLimited.sizes)
        timing_of(arms, BlockTimer(arms), 0)
    assert {asked[1] for asked in PowerLimited.sizes[before:]} == {PowerLimited.sizes[-1][1]}
