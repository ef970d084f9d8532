"""The loss rule: what it says, and by simulation how often it is wrong."""

import numpy as np
import pytest

from pytest_fp8.stats.loss import (
    LOSS_ALPHA,
    LOSS_CONFIDENCE,
    LOSS_MARGIN,
    MAX_LOSS_SEEDS,
    LossScale,
    decide_loss,
    loss_margin,
    tail_gap,
)
from pytest_fp8.stats.quantiles import student_quantile
from pytest_fp8.stats.restart import RESTART_ALPHA, decide_restart
from pytest_fp8.verdicts import Verdict


def test_the_tail_is_the_last_fifth():
    assert tail_gap([9, 9, 9, 9, 2], [0, 0, 0, 0, 1]) == 1


def test_the_margin_stays_within_its_bounds():
    nats = LossScale(1.0)
    assert loss_margin([], nats) == LOSS_MARGIN[0]
    assert loss_margin([1.0], nats) == LOSS_MARGIN[1]
    assert loss_margin([0.01, -0.01], nats) == pytest.approx(0.03)


def test_losses_pass_fail_or_ask_for_seeds():
    assert decide_loss([0.001, 0.002, 0.003], 0.02).verdict is Verdict.PASS
    assert decide_loss([0.09, 0.091, 0.092], 0.02).verdict is Verdict.FAIL
    assert decide_loss([0.0, 0.03, 0.01], 0.02).verdict is Verdict.INCONCLUSIVE
    assert decide_loss([0.001], 0.02).verdict is Verdict.INCONCLUSIVE, "one seed has no spread"


def loss_gate(rng, gap, sd, first=3):
    """Seeds are added one by one while they do not decide, as the plugin adds them."""
    gaps = list(rng.normal(gap, sd, first))
    while True:
        verdict = decide_loss(gaps, 0.02).verdict
        if verdict is not Verdict.INCONCLUSIVE or len(gaps) >= MAX_LOSS_SEEDS:
            return verdict
        gaps.append(rng.normal(gap, sd))


def loss_rate(gap, verdict, sd=0.004, repeats=1500):
    rng = np.random.default_rng(3)
    return np.mean([loss_gate(rng, gap, sd) is verdict for _ in range(repeats)])


@pytest.mark.parametrize("sd", [0.004, 0.03])
def test_a_healthy_loss_rarely_fails_whatever_its_seeds_spread(sd):
    # 0.004 nats is the spread between seeds seen at 1B, 0.03 that of 8B.
    assert loss_rate(0.0, Verdict.FAIL, sd) <= LOSS_ALPHA


def test_a_loss_just_at_the_margin_is_not_called_either_way_too_often():
    assert loss_rate(0.02, Verdict.FAIL) <= 1.5 * LOSS_ALPHA
    assert loss_rate(0.02, Verdict.PASS) <= 1.3 * (1 - LOSS_CONFIDENCE), "over all looks; 1500 cases are +-0.011"


@pytest.mark.parametrize("first", [3, *(pytest.param(count, marks=pytest.mark.nightly) for count in (2, 4, 8))])
def test_a_pass_holds_its_confidence_over_all_looks(first, monkeypatch):
    """Whatever the spread, and from whatever number of seeds the question starts."""
    rng = np.random.default_rng(7)

    def passed():
        return np.mean([loss_gate(rng, 0.02, 0.01, first) is Verdict.PASS for _ in range(2500)])

    assert passed() <= 1.3 * (1 - LOSS_CONFIDENCE), "0.05, and three standard errors of this simulation"
    monkeypatch.setattr("pytest_fp8.stats.loss.LOOK_ALPHA", {})
    assert first == 8 or passed() > 0.075, "the simulation sees what the correction prevents"


def test_healthy_seeds_mostly_pass_at_the_first_look():
    rng = np.random.default_rng(8)
    first = [decide_loss(list(rng.normal(0, 0.004, 3)), 0.02).verdict for _ in range(1000)]
    assert np.mean([verdict is Verdict.PASS for verdict in first]) > 0.95
    assert loss_rate(0.0, Verdict.PASS, sd=0.012) > 0.9


def test_a_loss_that_is_three_per_cent_higher_fails():
    assert loss_rate(0.002, Verdict.PASS) > 0.95
    assert loss_rate(0.08, Verdict.FAIL) > 0.99, "three per cent of 2.7 nats"


def test_seeds_that_are_judged_once_spend_the_whole_of_each_chance():
    """Above eight seeds there is one look, for a PASS as for a FAIL."""
    gaps = [0.021 + 0.012 * x for x in (1, -0.6, 1.4, 0.2, 1.8, -0.2, 1.2, 0.9, 1.1)]
    error = np.std(gaps, ddof=1) / 3
    proven = (np.mean(gaps) - 0.02) / error
    assert student_quantile(1 - LOSS_ALPHA, 8) < proven < student_quantile(1 - LOSS_ALPHA / 6, 8)
    assert decide_loss(gaps, 0.02).verdict is Verdict.FAIL


def test_curves_that_are_judged_once_begin_anew_with_the_whole_chance():
    gaps = [-0.11 + 0.1 * x for x in (1, -0.6, 1.4, 0.2, 1.8, -0.2, 1.2, 0.9, 1.1)]
    gaps = [gap - 0.11 for gap in gaps]
    found = decide_restart(gaps, LossScale(1.0))
    assert found.bound == pytest.approx(student_quantile(1 - RESTART_ALPHA, 8) * np.std(gaps, ddof=1) / 3)
