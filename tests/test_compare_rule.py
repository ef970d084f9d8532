"""The rule that compares two sides of one session, by simulation: how often it fails what is and is not slower."""

from __future__ import annotations

import numpy as np
import pytest

from pytest_fp8.stats.looks import ALPHA, BESIDE, BETA, against_base
from pytest_fp8.verdicts import Verdict

BETWEEN, WITHIN = 0.0015, 0.0075
"""Spread between processes and between blocks, as measured on H200s."""


def verdicts(change, tolerance=0.03, repeats=1000, between=BETWEEN):
    rng = np.random.default_rng(5)
    found = []
    for _ in range(repeats):
        pairs = []
        for count in BESIDE.pairs:
            while len(pairs) < count:
                pairs.append(list(np.log(1 + change) + rng.normal(0, between) + rng.normal(0, WITHIN, BESIDE.blocks)))
            decided = against_base(pairs, tolerance).verdict
            if decided is not Verdict.INCONCLUSIVE:
                break
        found.append(decided)
    return {verdict: found.count(verdict) / repeats for verdict in Verdict}


@pytest.mark.parametrize("between", [BETWEEN, 2 * BETWEEN])
def test_an_unchanged_head_passes(between):
    rates = verdicts(0.0, tolerance=0.01, between=between)
    assert rates[Verdict.FAIL] <= ALPHA
    assert rates[Verdict.PASS] + rates[Verdict.IMPROVED] > 0.99


def test_a_loss_of_exactly_the_tolerance_rarely_passes():
    assert verdicts(-0.01, tolerance=0.01)[Verdict.PASS] <= BETA


@pytest.mark.parametrize(("change", "tolerance", "power"), [(-0.01, 0.01, 0.95), (-0.02, 0.01, 0.99)])
def test_a_slower_head_fails(change, tolerance, power):
    assert verdicts(change, tolerance)[Verdict.FAIL] > power


def test_a_gain_that_one_pair_does_not_show_passes_at_the_last_look():
    """Any loss of 1 % is excluded, and there is no further pair to ask."""
    pairs = [[0.012 + 0.0005 * k for k in range(-5, 5)] for _ in range(BESIDE.pairs[-1] - 1)]
    pairs.append([-0.0005] * 10)
    assert against_base(pairs, 0.01).verdict is Verdict.PASS
    assert against_base(pairs[:5] * 2, 0.01).verdict is Verdict.IMPROVED


def test_bf16_taken_off_leaves_what_is_fp8s_own():
    slower = [[-0.05 + 0.001 * k for k in range(-2, 3)]] * 4
    same = [[0.001 * k for k in range(-2, 3)]] * 4
    change = against_base(slower, 0.03).estimate
    low, high = change.change_interval
    assert low < change.change < high < 0, "a change that its interval lies around"
    own = change.less(change)
    assert abs(own.theta) < own.half_width
    own = change.less(against_base(same, 0.03).estimate)
    assert own.theta == pytest.approx(-0.05)
    assert own.half_width < 0.03


@pytest.mark.parametrize("tolerance", [0, 1, -0.1])
def test_a_tolerance_is_a_fraction(tolerance):
    with pytest.raises(ValueError, match="between 0 and 1"):
        against_base([[0.0]], tolerance)
