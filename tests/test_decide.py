"""The decision rules: what they say, and by simulation how often they are wrong."""

import math

import numpy as np
import pytest

from pytest_fp8.gate.decide import (
    ALPHA,
    LOOKS,
    LOSS_MARGIN,
    decide_loss,
    decide_speedup,
    log_ratios,
    loss_margin,
    smallest_tolerance,
    tail_gap,
)
from pytest_fp8.gate.verdicts import Verdict

BASE = math.log(1.13)
BETWEEN, WITHIN = 0.003, 0.005
"""Spread between processes and between blocks, as measured on an H200."""


def processes(rng, runs, blocks, change=0.0):
    return [
        list(BASE + math.log(1 + change) + rng.normal(0, BETWEEN) + rng.normal(0, WITHIN, blocks)) for _ in range(runs)
    ]


def gate(rng, change, looks=LOOKS):
    """One gate of one case, with all its looks; the baseline is drawn anew, as a real one is."""
    baseline = [float(np.median(x)) for x in processes(rng, 2, LOOKS[0][1])]
    taken = processes(rng, 1, LOOKS[0][1], change)
    for runs, blocks in looks:
        taken += processes(rng, runs - len(taken), blocks, change)
        verdict = decide_speedup(taken, baseline=baseline, tolerance=0.03, floor=None).verdict
        if verdict is not Verdict.INCONCLUSIVE:
            break
    return verdict


def rate(change, verdict, repeats=1500):
    rng = np.random.default_rng(12)
    return np.mean([gate(rng, change) is verdict for _ in range(repeats)])


def test_a_healthy_case_is_called_a_regression_less_often_than_alpha():
    assert rate(0.0, Verdict.FAIL) <= ALPHA
    assert rate(0.0, Verdict.PASS) > 0.98


def test_a_loss_at_the_tolerance_does_not_pass():
    assert rate(-0.03, Verdict.PASS) <= 0.02


@pytest.mark.parametrize(("change", "power"), [(-0.05, 0.85), (-0.08, 0.99)])
def test_a_real_regression_fails(change, power):
    assert rate(change, Verdict.FAIL) >= power


def test_the_median_forgives_one_wild_block():
    blocks = [BASE, BASE, BASE - 1.0, BASE, BASE, BASE]
    assert decide_speedup([blocks], baseline=[BASE, BASE], tolerance=0.03, floor=None).verdict is Verdict.PASS


def test_floor_and_baseline_are_both_held():
    slow = [[math.log(0.9)] * 6]
    assert decide_speedup(slow, floor=1.0).reason == "floor"
    assert decide_speedup(slow, baseline=[math.log(0.9)], floor=None).verdict is Verdict.PASS
    assert decide_speedup(slow, baseline=[math.log(1.0)], floor=None).reason == "baseline"
    assert decide_speedup(slow, floor=None).verdict is Verdict.NOT_EXERCISED


def test_close_to_the_floor_is_inconclusive():
    assert decide_speedup([[0.0] * 6], floor=1.0).verdict is Verdict.INCONCLUSIVE


def test_a_slowdown_common_to_both_arms_cancels():
    bf16, fp8 = np.full(12, 100.0), np.full(12, 80.0)
    assert log_ratios(bf16 * 1.1, fp8 * 1.1) == pytest.approx(log_ratios(bf16, fp8))


def test_a_linear_drift_cancels_within_a_block():
    # ABBA at times 0, 1, 2, 3: the arms' mean times are equal.
    drift = np.exp(0.01 * np.arange(4))
    [x] = log_ratios([100 * drift[0], 100 * drift[3]], [80 * drift[1], 80 * drift[2]])
    assert x == pytest.approx(math.log(100 / 80))


def test_blocks_that_do_not_pair_are_an_error():
    with pytest.raises(ValueError, match="pairs"):
        log_ratios([1.0], [1.0])


def test_two_processes_hold_the_tolerance_that_the_cases_gate_at():
    assert smallest_tolerance(2, 0.0) < 0.03
    assert smallest_tolerance(2, 0.01) > 0.03


def test_the_tail_is_the_last_fifth():
    assert tail_gap([9, 9, 9, 9, 2], [0, 0, 0, 0, 1]) == 1


def test_the_margin_stays_within_its_bounds():
    assert loss_margin([]) == LOSS_MARGIN[0]
    assert loss_margin([1.0]) == LOSS_MARGIN[1]
    assert loss_margin([0.01, -0.01]) == pytest.approx(0.03)


def test_losses_pass_fail_or_ask_for_seeds():
    assert decide_loss([0.001, 0.002, 0.003], 0.02).verdict is Verdict.PASS
    assert decide_loss([0.09, 0.091, 0.092], 0.02).verdict is Verdict.FAIL
    assert decide_loss([0.0, 0.03, 0.01], 0.02).verdict is Verdict.INCONCLUSIVE
    assert decide_loss([0.001], 0.02).verdict is Verdict.INCONCLUSIVE, "one seed has no spread"


def loss_rate(gap, verdict, sd=0.004, seeds=4, repeats=2000):
    rng = np.random.default_rng(3)
    return np.mean([decide_loss(list(rng.normal(gap, sd, seeds)), 0.02).verdict is verdict for _ in range(repeats)])


def test_the_loss_rule_by_simulation():
    assert loss_rate(0.002, Verdict.FAIL) < 0.001, "healthy"
    assert loss_rate(0.002, Verdict.PASS) > 0.95
    assert loss_rate(0.02, Verdict.PASS) <= 0.06, "at the margin, at most the 5 % that were asked for"
    assert loss_rate(0.08, Verdict.FAIL) > 0.99, "three per cent of 2.7 nats"
