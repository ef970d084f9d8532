"""Sessions in which the host sets an arm's pace: when busy times are taken, stored and judged, and what is said."""

from __future__ import annotations

import itertools
from functools import partial

import pytest

from helpers.fakes import H200, FakeProcess, install, timed
from helpers.steps import recorded_step
from helpers.waiting import Quiet, Scattering, Waiting, asked_of, updated
from pytest_fp8 import Case, Verdict
from pytest_fp8.arms.pair import PairArms
from pytest_fp8.arms.pool import ArmPool
from pytest_fp8.questions.speed.evidence import timing_for_baseline, timing_of
from pytest_fp8.questions.speed.timing import BlockTimer
from pytest_fp8.stats.looks import GATE

TE = recorded_step("1b-transformer_engine-current")


class LateWaiting(Waiting):
    """The host is quiet while some pairs are timed."""

    slow: tuple[int, ...] = ()
    """Pairs whose steps wait, the first one is 1."""

    def blocks(self, count, steps, dropped):
        waits = len(self.world.built) // 2 in self.slow
        return timed([100.0 if waits else self.works + 1] * count)

    def busy(self, steps):
        return {**super().busy(steps), "step_ms": [self.works + 1] * steps}


def run_on(monkeypatch, kind, seed=1, slow=(), **world):
    install(monkeypatch, H200, **{"busy": 40.0, **world})
    monkeypatch.setattr("pytest_fp8.arms.pool.ArmProcess", kind)
    monkeypatch.setattr(FakeProcess, "pids", itertools.count(10_000 * seed))
    monkeypatch.setattr(LateWaiting, "slow", slow)
    monkeypatch.setattr(Waiting, "asked_busy", [])


# -- what an update stores ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "slow", "stored", "judged"),
    [
        (Waiting, (), False, True),
        (LateWaiting, (2,), False, True),
        (LateWaiting, (4,), False, True),
        (LateWaiting, (), False, False),
        (LateWaiting, (), True, True),
        (Scattering, (), False, True),
        (Quiet, (), False, False),
        (Quiet, (), True, True),
    ],
)
def test_an_update_has_busy_times_of_every_pair_and_judges_by_them_where_any_waits(
    monkeypatch, kind, slow, stored, judged
):
    """Seen with Transformer Engine at 1B: on one H200 the first of four pairs did not wait, on another the fourth alone
    did. With recomputation on two H100s no arm idled a tenth of its step, and blocks of 255 to 308 ms gave processes
    that could hold 3.1 %."""
    run_on(monkeypatch, kind, slow=slow)
    decision, rows = updated(4, host_bound=stored)
    assert [len(rows["speedup"]), len(rows["busy_speedup"])] == [4, 4]
    assert len(set(Waiting.asked_busy)) == 8, "both arms of each pair"
    assert (decision.numbers["on_busy"], decision.numbers["host_bound"]) == (judged, judged)
    account = decision.numbers["account"]
    assert rows["speedup_limit"] == [account["busy_limit" if judged else "limit"]]
    assert [rows["earned_ms"], rows["casts_ms"]] == [[account["earned_ms"]], [account["casts_ms"]]]


@pytest.mark.parametrize("waits", [True, False])
def test_arms_that_take_turns_have_the_busy_times_of_their_profile(monkeypatch, waits):
    """Others would cost a build of each."""
    run_on(monkeypatch, Waiting if waits else FakeProcess, busy=40.0 if waits else 99.0, kernels_alone=True)
    pool = ArmPool(H200)
    arms = PairArms(Case("1b", "torchao", "tensorwise"), pool, None)
    pool.separate(*arms.pair)
    arms.start()
    taken = arms.run(lambda: timing_for_baseline(arms, BlockTimer(arms, takes_busy=True), 2))
    pool.close()
    assert arms.takes_turns
    assert [len(times) for times in taken.fp8_busy] == [5, 0]


def test_steps_without_kernels_of_their_own_give_no_busy_times(monkeypatch):
    run_on(monkeypatch, FakeProcess)  # it waits; its profile has no steps of kernels alone
    assert "busy_speedup" not in updated(2)[1]


# -- what a gate asks ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slow", [(2, 3, 4), (2,)], ids=["from then on", "once"])
def test_a_gate_takes_busy_times_from_the_first_pair_that_waits(monkeypatch, slow):
    """A later pair that does not wait changes nothing of what an earlier one showed."""
    run_on(monkeypatch, LateWaiting, slow=slow)
    pool = ArmPool(H200)
    arms = PairArms(Case("1b", "torchao", "tensorwise"), pool, None)
    arms.start()
    timer = BlockTimer(arms)
    taken = [arms.run(partial(timing_of, arms, timer, look)) for look in range(len(GATE.pairs))][-1]
    pool.close()
    assert [bool(times) for times in taken.fp8_busy] == [False, True, True, True]
    assert taken.host_bound, "which all blocks together need not show"


BOTH, STEPS = ("speedup", "bf16_ms", "busy_speedup"), ("speedup", "bf16_ms")


@pytest.mark.parametrize(
    ("kind", "kept", "slower", "verdicts"),
    [
        (LateWaiting, BOTH, 1.0, {Verdict.PASS}),
        (LateWaiting, BOTH, 1.2, {Verdict.FAIL}),
        (LateWaiting, STEPS, 1.0, {Verdict.INVALID}),
        (Scattering, BOTH, 1.0, {Verdict.PASS}),
        (Scattering, BOTH, 1.12, {Verdict.FAIL}),
        (Scattering, STEPS, 1.0, {*Verdict} - {Verdict.FAIL}),
    ],
)
def test_a_baseline_of_a_quiet_host_is_asked_on_a_slow_one(monkeypatch, kind, kept, slower, verdicts):
    """Seen at 8B with Transformer Engine on an H200: stored at 1.254x of steps on a quiet host, four pairs of processes
    at 1.03x to 1.28x on a busy one decided nothing. On an H100 they were undecided at -1.1 % [-3.1 %, +0.9 %]."""
    bf16, fp8 = {LateWaiting: (40.0, 32.0), Scattering: (92.0, 86.0)}[kind]
    run_on(monkeypatch, LateWaiting if kind is LateWaiting else Quiet)
    _, stored = updated(4)
    run_on(monkeypatch, kind, slow=(1, 2, 3, 4))
    monkeypatch.setattr(kind, "works", property(lambda self: fp8 * slower if self.is_fp8 else bf16))
    decision = asked_of(stored, kept)
    assert decision.verdict in verdicts, decision.message
    assert decision.numbers["on_busy"] is (kept is BOTH)
