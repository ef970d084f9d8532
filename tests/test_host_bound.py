"""Sessions in which the host sets an arm's pace: when busy times are taken, stored and judged, and what is said."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from helpers.evidence import verdict_of
from helpers.fakes import H200, FakeProcess, install, timed
from helpers.recorded_arms import BF16, NOISE, asked, sessions
from helpers.steps import recorded_step
from helpers.waiting import Quiet, Scattering, Waiting, asked_of, updated
from pytest_fp8 import Case, Verdict
from pytest_fp8.arms.pair import PairArms
from pytest_fp8.arms.pool import ArmPool
from pytest_fp8.questions.speed.check import check_speedup
from pytest_fp8.questions.speed.evidence import TimingEvidence, timing_for_baseline, timing_of
from pytest_fp8.questions.speed.host import Beside, Turn, scatters
from pytest_fp8.questions.speed.timing import BlockTimer
from pytest_fp8.report.table import stored_of
from pytest_fp8.stats.components import MEASURED
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


def test_a_step_that_the_profiler_lost_is_left_out(monkeypatch):
    taken = TimingEvidence([[1.0]], [[1.0]], bf16_busy=[[40.0, 0.0, 40.0], [0.0]], fp8_busy=[[32.0, 32.0, 0.0], [32.0]])
    assert taken.busy_ratios() == [[pytest.approx(math.log(40 / 32))]]
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


# -- how often that is right ----------------------------------------------------------------------------------------


def gate(rng, lost=0.0, busy_stored=True):
    """One of a gate's 30 cases, look by look, on a host like that of an H100 which held up all blocks of FP8 in a
    process by up to 2 %, and a third of them by up to a fifth. Busy times are as far from the stored ones as sessions
    are."""
    between = rng.normal(0, MEASURED.busy)
    history = [rng.normal(0.15, MEASURED.block, (2, 8)).tolist()]
    busy_history = [rng.normal(rng.normal(0.19, MEASURED.busy), 0.02, (2, 30)).tolist()]
    bf16, fp8, busy = [], [], []
    blocks = GATE.blocks
    for processes in GATE.pairs:
        while len(fp8) < processes:
            late = (rng.random(2 * blocks) < 0.33) * rng.uniform(0, 0.2, 2 * blocks) + rng.uniform(0, 0.02)
            bf16.append((300 * np.exp(rng.normal(0, MEASURED.block, 2 * blocks))).tolist())
            fp8.append((300 * np.exp(rng.normal(lost - 0.15, MEASURED.block, 2 * blocks)) * (1 + late)).tolist())
            busy.append((240 * np.exp(rng.normal(lost - 0.19 + between, 0.02, 30))).tolist())
        taken = [index for index in range(processes) if any(map(scatters, bf16[: index + 1], fp8[: index + 1]))]
        works = {
            "bf16_busy": [[240.0] * 30 if index in taken else [] for index in range(processes)],
            "fp8_busy": [busy[index] if index in taken else [] for index in range(processes)],
        }
        stored = {"history": history, "busy_history": busy_history if busy_stored else ()}
        decision = check_speedup(TimingEvidence(bf16, fp8, **works), floor=None, tolerance=0.02, **stored)
        if decision.verdict is not Verdict.INCONCLUSIVE:
            break
    return decision.verdict


def gates(lost, **how):
    return Counter(gate(np.random.default_rng(seed), lost, **how) for seed in range(100))


def test_a_healthy_case_on_such_a_host_passes_and_hardly_fails():
    found = gates(0.0)
    assert found[Verdict.PASS] >= 94
    assert found[Verdict.FAIL] <= 1
    assert gates(0.0, busy_stored=False)[Verdict.FAIL] == 0, "nor without busy times to ask"


@pytest.mark.parametrize(("lost", "fails", "passes"), [(0.08, 94, 0)])
def test_a_loss_of_what_one_session_of_busy_times_can_hold_is_caught_on_such_a_host(lost, fails, passes):
    found = gates(lost)
    assert found[Verdict.FAIL] >= fails
    assert found[Verdict.PASS] <= passes


STORED = {"history": [[[0.143, 0.144] * 4] * 2], "busy_history": [[[0.1815, 0.1816] * 15] * 2]}
"""A baseline of 300 ms in BF16 and 260 in FP8, of which the GPU works 240 and 200."""


@pytest.mark.parametrize(("late", "changed", "works"), [(1, Verdict.FAIL, 1.07), (0, Verdict.IMPROVED, 0.93)])
@pytest.mark.parametrize("moved", [True, False], ids=["the GPU's", "the host's"])
def test_busy_time_tells_a_change_from_a_host_that_holds_blocks_up(late, changed, works, moved):
    blocks = [[300.0] * 12, [260.0] * 12]
    blocks[late] = [time * (1.05 + 0.03 * (index % 4 > 1)) for index, time in enumerate(blocks[late])]
    busy = 200.0 * (works if moved else 1.0)
    gpu = {"bf16_busy": [[240.0, 242.0] * 15] * 4, "fp8_busy": [[busy, 1.01 * busy] * 15] * 4}
    evidence = TimingEvidence([blocks[0]] * 4, [blocks[1]] * 4, **gpu)
    decision = check_speedup(evidence, floor=None, tolerance=0.02, **STORED)
    assert decision.verdict is (changed if moved else Verdict.PASS)
    assert decision.numbers["on_busy"]
    one = {"bf16_busy": [[], *gpu["bf16_busy"][:1]], "fp8_busy": [[], [230.0, 232.0] * 15]}
    alone = check_speedup(TimingEvidence([blocks[0]] * 2, [blocks[1]] * 2, **one), floor=None, tolerance=0.02, **STORED)
    assert alone.verdict is Verdict.INCONCLUSIVE, "busy times of one pair alone fail nothing"


# -- what is said -------------------------------------------------------------------------------------------------


def launch_bound(fp8_busy, **more):
    """Transformer Engine on a slow host, with so many busy milliseconds a step in each of two processes."""
    fp8 = replace(TE, step_ms=[210.0] * 5, busy_ms=[fp8_busy] * 5)
    busy = {"bf16_busy": [[113.0, 113.2, 112.9, 113.1, 113.0]] * 2, "fp8_busy": [[fp8_busy * x for x in NOISE[:5]]] * 2}
    return asked(fp8=fp8, fp8_ms=206.0, **busy, **more)


def test_a_launch_bound_step_is_gated_on_busy_time():
    stored = {"floor": None, "history": sessions(0.59), "busy_history": sessions(1.154)}
    decision = launch_bound(98.0, **stored)
    verdict_of(decision, Verdict.PASS, "1.154x", "of busy time, since FP8 waits for the host", "0.590x of step time")
    assert stored_of(decision.numbers) == "(1.154 busy)"
    [note] = decision.numbers["notes"]
    assert note.endswith("since FP8 waits for the host: the GPU works 98 ms of FP8's 206 ms step")
    verdict_of(launch_bound(120.0, **stored), Verdict.FAIL, "lost speed", "of busy time")
    known = replace(MEASURED, sessions=60, busy_sessions=60)
    like_steps, apart = (
        launch_bound(98.0, **stored, components=replace(known, busy=busy)) for busy in (known.session, 0.009)
    )
    assert apart.numbers["tolerance"] > 2 * like_steps.numbers["tolerance"], "held against what busy times differ by"


def test_a_step_that_takes_longer_than_bf16s_is_not_faster_though_its_kernels_are():
    """The floor is the user's question: with FP8 on, a step takes 206 ms in place of 121."""
    slow = launch_bound(98.0)
    verdict_of(slow, Verdict.FAIL, "0.590x", "the GPU works 98.0 ms of each 206.0", "in its work alone FP8 is 1.15x")
    assert slow.numbers["on_busy"] is False


@pytest.mark.parametrize("busy", [116.0, 113.2, 110.0])
def test_steps_that_prove_the_floor_answer_whatever_busy_times_say(busy):
    """BF16 idles 14 % of its step and FP8 6 to 11 %: the GPU works longer in FP8, and the user's step is faster."""
    bf16 = replace(BF16, step_ms=[132.0] * 5, busy_ms=[113.0] * 5)
    fp8 = replace(TE, step_ms=[123.0] * 5, busy_ms=[busy] * 5)
    works = {"bf16_busy": [[113.0 * x for x in NOISE[:5]]] * 2, "fp8_busy": [[busy * x for x in NOISE[:5]]] * 2}
    decision = asked(bf16=bf16, fp8=fp8, bf16_ms=132.0, fp8_ms=123.0, **works)
    verdict_of(decision, Verdict.PASS, "1.073x")
    assert decision.numbers["on_busy"] is False


def test_what_timed_steps_wait_is_no_work_though_the_profiled_ones_met_a_quiet_host():
    """The profiled steps wait 2 ms and the timed ones 29: without busy times that were asked beside these, the GPU
    seems to work 123 ms of them, and the speedup of busy time to be too good to be true."""
    fp8 = replace(recorded_step("1b-transformer_engine-delayed"), busy_ms=[95.6] * 5, step_ms=[97.6] * 5)
    works = {"bf16_busy": [[120.0] * 26] * 2, "fp8_busy": [[0.0] * 14 + [96.0] * 12] * 2}
    evidence = TimingEvidence(
        [[121.5] * 12] * 2, [[118.0, 125.0, 132.0] * 4] * 2, bf16_step=BF16, fp8_step=fp8, **works
    )
    account = evidence.account()
    assert (account.fp8.idle, account.fp8.busy) == pytest.approx((29.0, 96.0))
    assert replace(evidence, bf16_busy=(), fp8_busy=()).account().fp8.idle == pytest.approx(2.0)
    stored = {"history": sessions(0.97), "busy_history": sessions(1.25)}
    decision = check_speedup(evidence, floor=None, tolerance=0.02, **stored)
    verdict_of(decision, Verdict.PASS, "1.250x", "and 96.00 ms of FP8's 125.00 ms")


@pytest.mark.parametrize("clocks", [0.94, 0.97, 1.0, 1.03])
def test_busy_times_at_other_clocks_hide_no_reference_that_sleeps(clocks):
    """It sleeps for 15 % of its step, and FP8 waits for 2 %: at clocks 6 % higher that would seem to be 8 %."""
    fp8 = replace(recorded_step("1b-transformer_engine-delayed"), busy_ms=[95.6] * 5, step_ms=[97.6] * 5)
    works = {"bf16_busy": [[113.0 * clocks] * 26] * 2, "fp8_busy": [[95.6 * clocks] * 26] * 2}
    bf16 = replace(BF16, step_ms=[133.0] * 5, busy_ms=[113.0] * 5)
    decision = asked(bf16=bf16, fp8=fp8, bf16_ms=133.0, fp8_ms=97.6, **works)
    verdict_of(decision, Verdict.INVALID, "the reference waits for its host")


@pytest.mark.parametrize(("retries", "memory"), [(12, True), (1, False), (0, False)])
def test_an_arm_that_waits_for_memory_is_told_so_and_not_of_its_host(retries, memory):
    """An arm alone on its GPU, whose step has no room for its tensors: no other arm is in its way."""
    bf16 = replace(BF16, step_ms=[133.0] * 5, busy_ms=[113.0] * 5)
    fp8 = replace(recorded_step("1b-transformer_engine-delayed"), busy_ms=[95.6] * 5, step_ms=[97.6] * 5)
    turns = [Turn("BF16", steps=6, retries=retries), Turn("FP8", steps=6), Turn("BF16", steps=6)]
    decision = asked(bf16=bf16, fp8=fp8, bf16_ms=133.0, fp8_ms=97.6, beside=Beside(turns=turns))
    verdict_of(decision, Verdict.INVALID, "the reference waits for its host")
    assert ("too little memory for a step of BF16's arm" in decision.cause) is memory
    turns = [Turn("FP8", steps=6, retries=retries), Turn("BF16", retries=99), Turn("FP8", steps=6)]
    decision = launch_bound(120.0, beside=Beside(turns=turns))
    verdict_of(decision, Verdict.FAIL, "FP8 is not faster than the best BF16")
    assert ("too little memory for a step of FP8's arm" in decision.cause) is memory


def test_a_stored_session_asks_for_busy_times_and_one_without_them_for_step_times():
    busy = {"bf16_busy": [[113.0] * 5] * 2, "fp8_busy": [[99.4] * 5] * 2}
    seen = "of busy time, since the host held up steps, here or when the baseline was stored"
    stored = asked(fp8_ms=106.0, floor=None, host_bound=True, **busy)
    verdict_of(stored, Verdict.NOT_EXERCISED, seen, "limit 1.34x of busy time")
    decision = launch_bound(98.0, floor=None, history=sessions(0.59))
    verdict_of(decision, Verdict.PASS)
    assert decision.numbers["on_busy"] is False
