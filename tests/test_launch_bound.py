"""Arms that wait for their host: when their speedup is judged by busy time, and what is said of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers.evidence import verdict_of
from helpers.recorded_arms import BF16, NOISE, asked, sessions
from helpers.steps import recorded_step
from pytest_fp8 import Verdict
from pytest_fp8.questions.speed.check import check_speedup
from pytest_fp8.questions.speed.evidence import TimingEvidence
from pytest_fp8.questions.speed.host import Turn
from pytest_fp8.report.cells import baseline_of
from pytest_fp8.stats.components import MEASURED

BUSY = {"bf16_busy": [[113.0] * 5] * 2, "fp8_busy": [[99.4] * 5] * 2}


def launch_bound(fp8_busy, **more):
    """Transformer Engine on a slow host, with so many busy milliseconds a step in each of two processes."""
    fp8 = replace(recorded_step("1b-transformer_engine-current"), step_ms=[210.0] * 5, busy_ms=[fp8_busy] * 5)
    busy = {"bf16_busy": [[113.0, 113.2, 112.9, 113.1, 113.0]] * 2, "fp8_busy": [[fp8_busy * x for x in NOISE[:5]]] * 2}
    return asked(fp8=fp8, fp8_ms=206.0, **busy, **more)


def test_a_launch_bound_step_is_gated_on_busy_time():
    stored = {"floor": None, "history": sessions(0.59), "busy_history": sessions(1.154)}
    decision = launch_bound(98.0, **stored)
    verdict_of(decision, Verdict.PASS, "1.154x", "of busy time, since FP8 waits for the host", "0.590x of step time")
    assert decision.numbers["gated_on"] == "busy time"
    assert [baseline_of({**decision.numbers, **old}) for old in ({}, {"gated_baseline": None})] == [
        "1.154x busy",
        "0.590x",
    ]
    [note] = decision.numbers["notes"]
    assert (
        note
        == "speedup judged by busy time, 1.154x, since FP8 waits for the host: the GPU works 98 ms of FP8's 206 ms step"
    )
    verdict_of(launch_bound(120.0, **stored), Verdict.FAIL, "lost speed", "of busy time")


def test_busy_time_is_held_against_what_sessions_differ_by_in_busy_time():
    stored = {"floor": None, "history": sessions(0.59), "busy_history": sessions(1.154)}
    known = replace(MEASURED, sessions=60, busy_sessions=60)
    like_steps, apart = (
        launch_bound(98.0, **stored, components=replace(known, busy=busy)) for busy in (known.session, 0.009)
    )
    assert apart.numbers["tolerance"] > 2 * like_steps.numbers["tolerance"]
    assert apart.numbers["change_error"] > like_steps.numbers["change_error"]


def test_a_step_that_takes_longer_than_bf16s_is_not_faster_though_its_kernels_are():
    """The floor is the user's question: with FP8 on, a step takes 206 ms in place of 121."""
    slow = launch_bound(98.0)
    verdict_of(slow, Verdict.FAIL, "0.590x", "the GPU works 98.0 ms of each 206.0", "in its work alone FP8 is 1.15x")
    assert slow.numbers["gated_on"] == "step time"
    verdict_of(launch_bound(120.0), Verdict.FAIL, "launch-bound: the GPU works 120.0 ms of each 206.0 to 206.2 ms step")


@pytest.mark.parametrize("busy", [116.0, 113.2, 110.0])
def test_steps_that_prove_the_floor_answer_whatever_busy_times_say(busy):
    """BF16 idles 14 % of its step and FP8 6 to 11 %: the GPU works longer in FP8, and the user's step is faster."""
    bf16 = replace(BF16, step_ms=[132.0] * 5, busy_ms=[113.0] * 5)
    fp8 = replace(recorded_step("1b-transformer_engine-current"), step_ms=[123.0] * 5, busy_ms=[busy] * 5)
    works = {"bf16_busy": [[113.0 * x for x in NOISE[:5]]] * 2, "fp8_busy": [[busy * x for x in NOISE[:5]]] * 2}
    decision = asked(bf16=bf16, fp8=fp8, bf16_ms=132.0, fp8_ms=123.0, **works)
    verdict_of(decision, Verdict.PASS, "1.073x")
    assert decision.numbers["gated_on"] == "step time"


def test_what_timed_steps_wait_is_no_work_though_the_profiled_ones_met_a_quiet_host():
    """The profiled steps wait 2 ms and the timed ones 29: without busy times that were asked beside these, the GPU
    seems to work 123 ms of them, and the speedup of busy time to be too good to be true."""
    fp8 = replace(recorded_step("1b-transformer_engine-delayed"), busy_ms=[95.6] * 5, step_ms=[97.6] * 5)
    works = {"bf16_busy": [[120.0] * 26] * 2, "fp8_busy": [[96.0] * 26] * 2}
    evidence = TimingEvidence([[121.5] * 12] * 2, [[118.0, 125.0, 132.0] * 4] * 2, bf16_gpu=BF16, fp8_gpu=fp8, **works)
    account = evidence.account()
    assert (account.fp8.idle, account.fp8.busy) == pytest.approx((29.0, 96.0))
    assert account.busy_speedup == pytest.approx(1.25)
    assert replace(evidence, bf16_busy=(), fp8_busy=()).account().fp8.idle == pytest.approx(2.0)
    lost = replace(evidence, fp8_busy=[[0.0] * 14 + [96.0] * 12] * 2)
    assert lost.account().fp8.busy == pytest.approx(96.0), "steps in which the profiler saw no kernel"
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
    decision = asked(bf16=bf16, fp8=fp8, bf16_ms=133.0, fp8_ms=97.6, turns=turns)
    verdict_of(decision, Verdict.INVALID, "the reference waits for its host")
    assert ("too little memory for a step of BF16's arm" in decision.cause) is memory
    turns = [Turn("FP8", steps=6, retries=retries), Turn("BF16", retries=99), Turn("FP8", steps=6)]
    decision = launch_bound(120.0, turns=turns)
    verdict_of(decision, Verdict.FAIL, "FP8 is not faster than the best BF16")
    assert ("too little memory for a step of FP8's arm" in decision.cause) is memory
    assert ("waits for the host" in decision.cause) is not memory


@pytest.mark.parametrize("clocks", [(0.97, 1.0), (0.94, 1.0), (1.0, 0.94), (0.94, 0.94)])
def test_busy_times_at_other_clocks_accuse_no_healthy_reference(clocks):
    """Its step calls the CUDA runtime once more, at no cost; and no arm waits by the clocks alone."""
    fp8 = replace(recorded_step("1b-transformer_engine-delayed"), busy_ms=[95.6] * 5, step_ms=[97.6] * 5)
    works = {"bf16_busy": [[119.0 * clocks[0]] * 26] * 2, "fp8_busy": [[95.6 * clocks[1]] * 26] * 2}
    bf16 = replace(BF16, step_ms=[121.0] * 5, busy_ms=[119.0] * 5, waits={"cudaStreamSynchronize": 1})
    decision = asked(bf16=bf16, fp8=fp8, bf16_ms=121.0, fp8_ms=97.6, **works)
    verdict_of(decision, Verdict.PASS)
    assert decision.numbers["gated_on"] == "step time"


def test_busy_times_that_a_stored_session_asks_for_are_said_to_be_so_with_their_limit():
    decision = asked(fp8_ms=106.0, floor=None, host_bound=True, **BUSY)
    seen = "of busy time, since the host held up steps, here or when the baseline was stored"
    verdict_of(decision, Verdict.NOT_EXERCISED, seen, "limit 1.34x of busy time")


def test_a_baseline_without_busy_times_is_asked_for_step_times():
    decision = launch_bound(98.0, floor=None, history=sessions(0.59))
    assert decision.numbers["gated_on"] == "step time"
    verdict_of(decision, Verdict.PASS)
    stored = sessions(1.25)
    both = {"history": sessions(0.59), "busy_history": sessions(1.14)}
    faster_host = asked(fp8_ms=106.0, floor=None, host_bound=True, **both, **BUSY)
    verdict_of(faster_host, Verdict.PASS, "of busy time, since the host held up steps")
    slower = launch_bound(98.0, floor=None, history=sessions(0.59), busy_history=stored)
    verdict_of(slower, Verdict.FAIL, "lost speed", "of busy time")
