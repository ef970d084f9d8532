"""The speedup question's check on times written by hand: floors, baselines, and what disturbs a measurement."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from helpers.evidence import verdict_of
from helpers.steps import gpu_step
from pytest_fp8 import Verdict
from pytest_fp8.codes import S
from pytest_fp8.gpu import Conditions
from pytest_fp8.questions.speed.check import check_speedup
from pytest_fp8.questions.speed.evidence import TimingEvidence
from pytest_fp8.questions.speed.host import Beside

FLASH = [gpu_step({}, attention=of) for of in ({"efficient": ["fmha_cutlassF"]}, {"cudnn": ["cudnn_flash"]})]


def sessions(speedup):
    """Four stored sessions of four processes, all of this speedup."""
    return [[[math.log(speedup)] * 8] * 4] * 4


def timing(fp8=80.0, **changes):
    noise = [0.999, 1.001, 1.0, 1.002, 0.998, 1.0] * 2
    bf16, mine = [100 * x for x in noise], [fp8 * x for x in reversed(noise)]
    return replace(TimingEvidence(bf16=[bf16, bf16], fp8=[mine, mine]), **changes)


def test_speedup_against_floor_and_baseline():
    verdict_of(check_speedup(timing(), floor=1.0, tolerance=0.03), Verdict.PASS, "1.250x")
    verdict_of(check_speedup(timing(120), floor=1.0, tolerance=0.03), Verdict.FAIL, "not faster than the best BF16")
    slower = check_speedup(timing(), floor=None, tolerance=0.03, history=sessions(1.35))
    verdict_of(slower, Verdict.FAIL, "lost speed against BF16", "baseline 1.350x less 3%")
    verdict_of(check_speedup(timing(), floor=None, tolerance=0.03), Verdict.NOT_EXERCISED, "--fp8-update")


def test_a_young_baseline_gates_coarsely_and_says_so():
    [one] = sessions(1.25)[:1]
    decision = check_speedup(timing(), floor=None, tolerance=0.02, history=[one])
    verdict_of(decision, Verdict.PASS, "baseline 1.250x less 2.", "(its 1 session(s) cannot hold 2%)")
    assert decision.numbers["tolerance"] > 0.02
    assert decision.numbers["sessions"] == 1
    wide = check_speedup(timing(), floor=None, tolerance=0.05, history=[one])
    assert "cannot hold" not in wide.message


def test_an_undecided_change_is_blamed_on_sessions_where_these_differ_most():
    decision = check_speedup(timing(), floor=None, tolerance=0.02, history=sessions(1.27))
    verdict_of(decision, Verdict.INCONCLUSIVE, "sessions on other machines differ by 0.38%", "pytest-fp8 compare")


def test_a_gain_asks_for_a_new_baseline():
    faster = check_speedup(timing(), floor=None, tolerance=0.02, history=sessions(1.18))
    verdict_of(faster, Verdict.IMPROVED, "+5.9%", S.FASTER_THAN_BASELINE)
    assert faster.verdict.passes


def test_the_number_of_gated_cases_reaches_the_rule():
    alone, among_many = (
        check_speedup(timing(), floor=None, tolerance=0.02, history=sessions(1.29), cases=cases)
        for cases in (1, 10_000)
    )
    assert (alone.verdict, among_many.verdict) == (Verdict.FAIL, Verdict.INCONCLUSIVE)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"beside": Beside([Conditions(strangers=(7,))])}, "another process used the GPU"),
        ({"beside": Beside([Conditions(1200, ("hardware thermal",))])}, "throttled"),
        (
            {"bf16_step": FLASH[0], "fp8_step": FLASH[1]},
            "different attention",
        ),
        ({"fp8_step": FLASH[1], "bf16_cudnn": 91900, "fp8_cudnn": 91400}, "two cuDNN libraries: 91900"),
    ],
)
def test_a_disturbed_measurement_is_invalid(changes, says):
    verdict_of(check_speedup(timing(**changes), floor=1.0, tolerance=0.03), Verdict.INVALID, says)


@pytest.mark.parametrize(
    ("stored", "verdict", "says"),
    [
        # BF16 takes 110 ms here.
        ([[100.0, 100.4]], Verdict.INVALID, "100.20 ms a step +-8%, as in 1 stored session"),
        ([[97.0], [100.2]], Verdict.INVALID, "97.00 to 100.20 ms a step +-8%, as in 2 stored session"),
        ([[120.4]], Verdict.INVALID, "reference is outside its own band"),
        ([[103.5]], Verdict.PASS, ""),
        ([[118.0]], Verdict.PASS, ""),
        ([[97.0], [104.0]], Verdict.PASS, ""),
    ],
)
def test_a_slowdown_of_both_arms_is_no_regression_of_fp8(stored, verdict, says):
    both = check_speedup(
        timing(88, bf16=[[110.0] * 12] * 2),
        floor=None,
        tolerance=0.03,
        history=sessions(1.25),
        baseline_reference_ms=stored,
    )
    verdict_of(both, verdict, says)


@pytest.mark.parametrize(("compiled", "says"), [(False, "was not compiled"), (True, "too small")])
def test_slower_than_bf16_names_a_missing_compile(compiled, says):
    decision = check_speedup(timing(120, fp8_compiled=compiled), floor=1.0, tolerance=0.03)
    verdict_of(decision, Verdict.FAIL, "not faster than the best BF16", says)


def test_a_pass_says_what_was_not_watched():
    decision = check_speedup(
        timing(beside=Beside([Conditions(unknown=("clocks", "other processes"))])), floor=1.0, tolerance=0.03
    )
    verdict_of(decision, Verdict.PASS, "not watched on this GPU: clocks, other processes")
    assert any("not watched" in note for note in decision.numbers["notes"])
    assert "not watched" not in check_speedup(timing(), floor=1.0, tolerance=0.03).message
