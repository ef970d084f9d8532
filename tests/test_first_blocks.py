"""How many blocks a pair takes, and what the first pair shows of the turns that later ones take."""

from __future__ import annotations

import math
from functools import partial

import pytest

from helpers.fakes import FakeProcess, timed
from helpers.power_limited import PowerLimited, pool_of_limited_arms
from pytest_fp8 import Case
from pytest_fp8.arms.pair import PairArms
from pytest_fp8.questions.speed.evidence import timing_of
from pytest_fp8.questions.speed.question import SpeedQuestion
from pytest_fp8.questions.speed.timing import BlockTimer
from pytest_fp8.stats.components import MEASURED
from pytest_fp8.stats.looks import BASELINE_BLOCKS


@pytest.fixture
def pool(monkeypatch):
    with pool_of_limited_arms(monkeypatch) as made:
        yield made


class ReferenceDrifts(FakeProcess):
    """The reference's first block of each turn is faster by 3 %, unless its first second does not count."""

    def blocks(self, count, steps, dropped):
        base, drifts = (280.0, 0.0) if self.is_fp8 else (370.0, 0.03)
        late = dropped * base > 1000
        times = [base * (1.0 if late or index else 1 - drifts) for index in range(count)]
        noisy = [float(time * math.exp(self.noise.normal(0, 0.001))) for time in times]
        return timed(noisy)


def test_a_reference_whose_turns_are_unsteady_is_seen(pool, monkeypatch):
    monkeypatch.setattr("pytest_fp8.arms.pool.ArmProcess", ReferenceDrifts)
    arms = PairArms(Case("8b", "torchao", "tensorwise"), pool, None)
    arms.start()
    assert arms.run(lambda: timing_of(arms, BlockTimer(arms), 0)).bf16[0] == pytest.approx([370.0] * 12, rel=0.005)


def test_a_gate_takes_six_blocks_of_each_pair_and_a_baseline_more(pool):
    arms = PairArms(Case("1b", "torchao", "tensorwise"), pool, None)
    arms.start()
    assert [len(times) for times in arms.run(lambda: timing_of(arms, BlockTimer(arms), 1)).fp8] == [12, 12]
    arms = PairArms(Case("1b", "torchao", "rowwise"), pool, None)
    arms.start()
    question = SpeedQuestion(arms, False, lambda _: [], MEASURED, "file", 30, processes=2)
    assert {len(times) for times in arms.run(question.first_timing).fp8} == {2 * BASELINE_BLOCKS}


def test_a_further_case_of_the_reference_begins_with_the_longer_turns(pool):
    for recipe in ("tensorwise", "rowwise"):
        arms = PairArms(Case("8b", "torchao", recipe), pool, None)
        arms.start()
        before = len(PowerLimited.sizes)
        arms.run(partial(timing_of, arms, BlockTimer(arms), 0))
    assert {asked[1] for asked in PowerLimited.sizes[before:]} == {PowerLimited.sizes[-1][1]}
