"""Busy times of pairs whose steps wait for the host: when they are asked for, stored and gated on."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest

from helpers.fakes import H200, FakeProcess, install, timed
from helpers.waiting import Waiting, asked_of, updated
from pytest_fp8 import Case
from pytest_fp8.arms.pair import PairArms
from pytest_fp8.arms.pool import ArmPool
from pytest_fp8.questions.speed.evidence import (
    FURTHER,
    TimingEvidence,
    busy_ratios,
    timing_for_baseline,
    timing_of,
)
from pytest_fp8.questions.speed.timing import BlockTimer
from pytest_fp8.stats.components import MEASURED
from pytest_fp8.stats.looks import GATE, processes_hold
from pytest_fp8.verdicts import Verdict


@pytest.mark.parametrize("works", [True, False], ids=["launch-bound", "busy"])
def test_busy_times_are_asked_of_every_process_that_waits(monkeypatch, works):
    install(monkeypatch, H200, busy=99.0 if not works else 40.0, kernels_alone=True)
    monkeypatch.setattr("pytest_fp8.arms.pool.ArmProcess", Waiting if works else FakeProcess)
    Waiting.asked_busy = []
    decision, stored = updated(3)
    assert len(stored["speedup"]) == 3
    account = decision.numbers["account"]
    assert [stored["earned_ms"], stored["casts_ms"]] == [[account["earned_ms"]], [account["casts_ms"]]]
    if not works:
        assert decision.numbers["gated_on"] == "step time"
        assert not decision.numbers["host_bound"]
        assert stored["speedup_limit"] == [account["limit"]]
        assert "bf16_wire_ms" not in stored, "one GPU"
        return
    assert {len(process) for process in stored["busy_speedup"]} <= {30, 32}, "3 s of steps of about 100 ms"
    assert stored["busy_speedup"][2][0] == pytest.approx(math.log(40 / 32), abs=0.01)
    assert len(set(Waiting.asked_busy)) == 6, "both arms of each pair"
    assert decision.numbers["gated_on"] == "busy time"
    assert [stored["bf16_busy_ms"][0], stored["fp8_busy_ms"][0]] == pytest.approx([40, 32], abs=0.1)
    assert stored["speedup_limit"] == [decision.numbers["account"]["busy_limit"]], "of what is gated on"


class LongSteps(Waiting):
    """Steps of 8B."""

    takes = 360.0

    def blocks(self, count, steps, dropped):
        return timed([self.takes] * count)

    def busy(self, steps):
        return {**super().busy(steps), "step_ms": [self.takes] * steps}


@pytest.mark.parametrize(
    ("takes", "steps", "scatter"),
    [(360.0, 30, 0.022), (800.0, 16, 0.014), (6500.0, 2, 0.0)],
    ids=["8B", "8B as published", "very long"],
)
def test_long_steps_are_as_many_as_a_tolerance_needs(monkeypatch, takes, steps, scatter):
    """Seen at 8B with Transformer Engine's current scaling: an update took ten steps of each of six processes, could
    hold 2.6 % with them, and stored nothing. Single log ratios scattered by 2.2 %, and means of a process no more than
    these let expect. Steps of 0.75 s and more scatter by 1.4 % at most: thirty of them take a minute a process."""
    install(monkeypatch, H200, busy=40.0, kernels_alone=True)
    monkeypatch.setattr("pytest_fp8.arms.pool.ArmProcess", LongSteps)
    monkeypatch.setattr(LongSteps, "takes", takes)
    _, stored = updated(2)
    assert {len(process) for process in stored["busy_speedup"]} == {steps}
    random = np.random.default_rng(0)

    def hold(steps):
        updates = (
            random.normal(random.normal(0.28, MEASURED.process, (4, 1)), scatter, (4, steps)) for _ in range(100)
        )
        return sum(processes_hold(update.tolist(), busy=True) <= 0.02 for update in updates)

    assert hold(steps) >= 90
    assert hold(10) <= 20 or takes > 360


class LateWaiting(Waiting):
    """The host is quiet while some pairs are timed."""

    slow: tuple[int, ...] = ()
    """Pairs whose steps wait, the first one is 1."""

    def blocks(self, count, steps, dropped):
        waits = len(self.world.built) // 2 in self.slow
        return timed([100.0 if waits else self.works + 1] * count)

    def busy(self, steps):
        return {**super().busy(steps), "step_ms": [self.works + 1] * steps}


@pytest.mark.parametrize("slow", [(2,), (4,), (1, 3), ()], ids=["second", "fourth", "some", "never"])
def test_an_update_has_busy_times_of_every_pair_whichever_waits(monkeypatch, slow):
    """Seen with Transformer Engine at 1B: on one H200 the first of four pairs did not wait, on another the fourth alone
    did, after 114.8, 114.8 and 116.6 ms a step; and both updates were refused for the scatter of step time."""
    install(monkeypatch, H200, busy=40.0, host=0.5)
    monkeypatch.setattr("pytest_fp8.arms.pool.ArmProcess", LateWaiting)
    monkeypatch.setattr(LateWaiting, "slow", slow)
    decision, stored = updated(4)
    assert [len(stored["speedup"]), len(stored["busy_speedup"])] == [4, 4]
    assert decision.numbers["host_bound"] is bool(slow)
    assert decision.numbers["gated_on"] == ("busy time" if slow else "step time")
    assert "1.25" in decision.seen or not slow


def test_an_update_of_what_is_gated_on_busy_time_stores_it_again_though_nothing_waits(monkeypatch):
    """Or the history that the gate asks would have no new session."""
    install(monkeypatch, H200, busy=40.0)
    monkeypatch.setattr("pytest_fp8.arms.pool.ArmProcess", LateWaiting)
    monkeypatch.setattr(LateWaiting, "slow", ())
    decision, stored = updated(2, host_bound=True)
    assert len(stored["busy_speedup"]) == 2
    assert (decision.numbers["gated_on"], decision.numbers["host_bound"]) == ("busy time", True)


@pytest.mark.parametrize(
    ("kept", "slower", "verdict"),
    [
        (["speedup", "bf16_ms", "busy_speedup"], 1.0, Verdict.PASS),
        (["speedup", "bf16_ms", "busy_speedup"], 1.2, Verdict.FAIL),
        (["speedup", "bf16_ms"], 1.0, Verdict.INVALID),
    ],
)
def test_a_baseline_of_a_quiet_host_is_asked_on_a_slow_one(monkeypatch, kept, slower, verdict):
    """Seen at 8B with Transformer Engine on an H200: stored at 1.254x of steps on a quiet host, four pairs of processes
    at 1.03x to 1.28x on a busy one decided nothing."""
    install(monkeypatch, H200, busy=40.0, host=0.5)
    monkeypatch.setattr("pytest_fp8.arms.pool.ArmProcess", LateWaiting)
    monkeypatch.setattr(LateWaiting, "slow", ())
    _, stored = updated(4)
    install(monkeypatch, H200, busy=40.0, host=0.5)
    monkeypatch.setattr("pytest_fp8.arms.pool.ArmProcess", LateWaiting)
    monkeypatch.setattr(LateWaiting, "slow", (1, 2, 3, 4))
    monkeypatch.setattr(LateWaiting, "works", property(lambda self: 32.0 * slower if self.is_fp8 else 40.0))
    decision = asked_of(stored, kept)
    assert decision.verdict is verdict, decision.message
    if verdict is not Verdict.INVALID:
        assert decision.numbers["gated_on"] == "busy time"
        assert decision.numbers["gated_baseline"] == pytest.approx(1.25, abs=0.01)


def gated(monkeypatch, slow):
    """All looks of a gate, of pairs of which these are slow."""
    install(monkeypatch, H200, busy=40.0)
    monkeypatch.setattr("pytest_fp8.arms.pool.ArmProcess", LateWaiting)
    monkeypatch.setattr(LateWaiting, "slow", slow)
    pool = ArmPool(H200)
    arms = PairArms(Case("1b", "torchao", "tensorwise"), pool, None)
    arms.start()
    timer = BlockTimer(arms)
    taken = [arms.run(partial(timing_of, arms, timer, look)) for look in range(len(GATE.pairs))][-1]
    pool.close()
    return taken


@pytest.mark.parametrize("slow", [(2, 3, 4), (2,)], ids=["from then on", "once"])
def test_a_gate_takes_busy_times_from_the_first_pair_that_waits(monkeypatch, slow):
    """A later pair that does not wait changes nothing of what an earlier one showed."""
    taken = gated(monkeypatch, slow)
    assert [bool(times) for times in taken.fp8_busy] == [False, True, True, True]
    assert taken.host_bound, "which all blocks together need not show"
    assert len(busy_ratios(taken)) == 3


@pytest.mark.parametrize("waits", [True, False])
def test_arms_that_take_turns_have_the_busy_times_of_their_profile(monkeypatch, waits):
    """Others would cost a build of each."""
    install(monkeypatch, H200, busy=40.0 if waits else 99.0, kernels_alone=True)
    monkeypatch.setattr("pytest_fp8.arms.pool.ArmProcess", Waiting if waits else FakeProcess)
    pool = ArmPool(H200)
    arms = PairArms(Case("1b", "torchao", "tensorwise"), pool, None)
    pool.separate(*arms.pair)
    arms.start()
    timer = BlockTimer(arms, takes_busy=True)
    taken = arms.run(lambda: timing_for_baseline(arms, timer, 2, lambda _: True))
    pool.close()
    assert arms.takes_turns
    assert [len(times) for times in taken.fp8_busy] == [5, 0]


def test_a_step_that_the_profiler_lost_is_left_out():
    taken = TimingEvidence([[1.0]], [[1.0]], bf16_busy=[[40.0, 0.0, 40.0], [0.0]], fp8_busy=[[32.0, 32.0, 0.0], [32.0]])
    assert busy_ratios(taken) == [[pytest.approx(math.log(40 / 32))]]


def test_no_further_pair_is_timed_for_busy_times_that_no_profile_can_give(monkeypatch):
    install(monkeypatch, H200, busy=40.0)  # it waits; its profile has no steps of kernels alone
    _, stored = updated(2)
    assert [len(stored.get(name, ())) for name in ("speedup", "busy_speedup")] == [2, 0]


@pytest.mark.parametrize(("fit_at", "measured"), [(1, 2), (3, 3), (9, 2 + FURTHER)])
def test_an_update_measures_a_few_more_pairs_until_they_can_be_stored(monkeypatch, fit_at, measured):
    install(monkeypatch, H200)
    pool = ArmPool(H200)
    arms = PairArms(Case("1b", "torchao", "tensorwise"), pool, None)
    arms.start()
    taken = arms.run(lambda: timing_for_baseline(arms, BlockTimer(arms), 2, lambda found: len(found.fp8) >= fit_at))
    pool.close()
    assert len(taken.fp8) == len(taken.bf16) == measured


@pytest.mark.parametrize(("noise", "pairs"), [(0.0, 2), (0.5, 2 + FURTHER)])
def test_pairs_that_can_gate_at_the_tolerance_are_enough(monkeypatch, noise, pairs):
    install(monkeypatch, H200, host=noise)
    _, stored = updated(2)
    assert len(stored["fp8_ms"]) == pairs
