"""The decision rules: what they say, and by simulation how often they are wrong."""

import math

import numpy as np
import pytest

from pytest_fp8.rules.loss import (
    LOSS_ALPHA,
    LOSS_CONFIDENCE,
    LOSS_MARGIN,
    MAX_LOSS_SEEDS,
    LossScale,
    decide_loss,
    loss_margin,
    tail_gap,
)
from pytest_fp8.rules.speed import (
    ALPHA,
    BASELINE_BLOCKS,
    BETA,
    GATED_CASES,
    LOOKS,
    POWER,
    center,
    center_variance,
    decide_speedup,
    holds,
    log_ratios,
    process_variances,
    smallest_tolerance,
)
from pytest_fp8.rules.statistics import median_variance, sample_sd
from pytest_fp8.verdicts import Verdict

BASE = math.log(1.13)
BETWEEN, WITHIN = 0.003, 0.005
"""Spread between processes and between blocks, as measured on an H200."""
TOLERANCE = 0.02


def processes(rng, runs, blocks, change=0.0, between=BETWEEN):
    centres = BASE + math.log1p(change) + rng.normal(0, between, (runs, 1))
    return (centres + rng.normal(0, WITHIN, (runs, blocks))).tolist()


def gate(rng, change, cases=30, between=BETWEEN, stored=4, tolerance=TOLERANCE):
    """One gate of one case, with all its looks; the baseline is drawn anew, as a real one is."""
    baseline = processes(rng, stored, BASELINE_BLOCKS, between=between)
    taken = processes(rng, LOOKS[-1][0], LOOKS[-1][1], change, between)
    for runs, blocks in LOOKS:
        seen = [x[:blocks] for x in taken[:runs]]
        verdict = decide_speedup(seen, baseline=baseline, tolerance=tolerance, floor=None, cases=cases).verdict
        if verdict is not Verdict.INCONCLUSIVE:
            break
    return verdict


def rate(change, verdict, repeats=1500, **how):
    rng = np.random.default_rng(12)
    return np.mean([gate(rng, change, **how) is verdict for _ in range(repeats)])


def test_a_session_of_thirty_healthy_cases_fails_less_often_than_alpha():
    # A rate of 0.01 / 30 per case: 6000 cases would show two failures.
    assert rate(0.0, Verdict.FAIL, repeats=6000) <= ALPHA / GATED_CASES
    assert rate(0.0, Verdict.PASS) > 0.995


def test_without_the_share_of_each_case_the_session_would_not_hold():
    # The same trials at the confidence of a single case, with processes that spread twice as much: it must be visible
    # that the number of cases does something.
    alone, shared = (rate(-0.01, Verdict.FAIL, cases=cases, between=0.005) for cases in (1, 30))
    assert shared < 0.75 * alone


def test_processes_that_spread_twice_as_much_as_assumed_cost_power_before_false_alarms():
    assert rate(0.0, Verdict.FAIL, repeats=3000, between=2 * BETWEEN) <= 0.005
    assert rate(-TOLERANCE, Verdict.FAIL, repeats=500, between=2 * BETWEEN) < 0.8


def test_a_loss_of_the_tolerance_rarely_passes():
    assert rate(-TOLERANCE, Verdict.PASS) <= BETA + 0.01


@pytest.mark.parametrize(("change", "power"), [(-0.02, 0.80), (-0.03, 0.95), (-0.08, 0.99)])
def test_a_real_regression_fails(change, power):
    assert rate(change, Verdict.FAIL) >= power


def test_a_real_gain_is_called_improved_and_a_healthy_case_is_not():
    assert rate(+0.04, Verdict.IMPROVED, repeats=500) >= 0.95
    assert rate(0.0, Verdict.IMPROVED, repeats=3000) <= ALPHA / GATED_CASES


def test_a_loss_that_a_wide_tolerance_excludes_passes_however_well_it_is_proven():
    lost = [[math.log(0.97)] * 6] * 4
    wide = decide_speedup(lost, baseline=[[0.0] * 12] * 4, tolerance=0.08, floor=None)
    narrow = decide_speedup(lost, baseline=[[0.0] * 12] * 4, tolerance=0.02, floor=None)
    assert (wide.verdict, narrow.verdict) == (Verdict.PASS, Verdict.FAIL)
    assert narrow.change == pytest.approx(math.log(0.97))


def test_one_process_never_fails_a_case():
    for looks in (1, 4):
        assert decide_speedup([[-0.5] * 6], baseline=[[0.0] * 6] * 4, looks=looks).verdict is Verdict.INCONCLUSIVE


def test_one_process_that_disagrees_keeps_a_case_from_failing():
    wild = [[-0.15] * 6, [-0.15] * 6, [0.0] * 6, [-0.15] * 6]
    assert decide_speedup(wild, baseline=[[0.0] * 12] * 4, floor=None).verdict is Verdict.INCONCLUSIVE


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 8])
def test_the_centre_of_a_baseline_is_as_uncertain_as_is_counted(count):
    values = np.median(np.random.default_rng(0).normal(size=(100_000, count)), axis=1)
    assert values.var() == pytest.approx(center_variance(count), rel=0.06)


def test_a_baseline_may_be_medians_or_blocks():
    by_block = decide_speedup([[0.1] * 6] * 2, baseline=[[0.1] * 6] * 4, floor=None)
    by_median = decide_speedup([[0.1] * 6] * 2, baseline=[0.1] * 4, floor=None)
    assert by_block == by_median
    assert center([[0.1, 0.2, 0.9], 0.3]) == pytest.approx(0.25)


def test_noise_that_only_the_baseline_shows_still_counts():
    calm, noisy = [[0.0] * 12] * 4, [[-0.02, 0.02] * 6] * 4
    run = [[0.0, 0.001] * 3] * 2
    assert process_variances(run, noisy)[0] > 5 * process_variances(run, calm)[0]


def test_noise_that_only_the_run_shows_counts_in_full_for_the_run():
    calm, noisy = [[-0.001, 0.001] * 6] * 8, [[-0.02, 0.02] * 3] * 2
    mine, theirs = process_variances(noisy, calm)
    assert mine == pytest.approx(process_variances(noisy, [])[0])
    assert theirs < mine / 2


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


def test_what_a_baseline_can_hold():
    assert smallest_tolerance(4, BETWEEN) < TOLERANCE
    assert smallest_tolerance(4, 0.01) > TOLERANCE
    assert smallest_tolerance(1, 0.0) > smallest_tolerance(2, BETWEEN) > smallest_tolerance(8, BETWEEN)


def test_what_a_baseline_is_said_to_hold_it_holds():
    spread = math.sqrt(BETWEEN**2 + WITHIN**2 * median_variance(BASELINE_BLOCKS))
    held = smallest_tolerance(4, spread, within=WITHIN)
    assert rate(-held, Verdict.FAIL, tolerance=held) == pytest.approx(POWER, abs=0.1)
    assert rate(-1.5 * held, Verdict.FAIL, tolerance=held) >= 0.95


def test_the_blocks_of_a_baseline_say_more_than_its_few_processes():
    # Four processes that agree by luck do not make a launch-bound case fit to gate.
    lucky = [[BASE - 0.03, BASE + 0.03] * 6] * 4
    assert sample_sd([np.median(x) for x in lucky]) == 0
    assert holds(lucky) > TOLERANCE
    assert holds([[BASE - 0.003, BASE + 0.003] * 6] * 4) < TOLERANCE


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


@pytest.mark.parametrize("first", [2, 3, 4, 8])
def test_a_pass_holds_its_confidence_over_all_looks(first, monkeypatch):
    """Whatever the spread, and from whatever number of seeds the question starts."""
    rng = np.random.default_rng(7)

    def passed():
        return np.mean([loss_gate(rng, 0.02, 0.01, first) is Verdict.PASS for _ in range(2500)])

    assert passed() <= 1.3 * (1 - LOSS_CONFIDENCE), "0.05, and three standard errors of this simulation"
    monkeypatch.setattr("pytest_fp8.rules.loss.LOOK_ALPHA", {})
    assert first == 8 or passed() > 0.075, "the simulation sees what the correction prevents"


def test_healthy_seeds_mostly_pass_at_the_first_look():
    rng = np.random.default_rng(8)
    first = [decide_loss(list(rng.normal(0, 0.004, 3)), 0.02).verdict for _ in range(1000)]
    assert np.mean([verdict is Verdict.PASS for verdict in first]) > 0.95
    assert loss_rate(0.0, Verdict.PASS, sd=0.012) > 0.9


def test_a_loss_that_is_three_per_cent_higher_fails():
    assert loss_rate(0.002, Verdict.PASS) > 0.95
    assert loss_rate(0.08, Verdict.FAIL) > 0.99, "three per cent of 2.7 nats"
