"""The speed rule against a history: what it says, and by simulation how often it is wrong."""

import math
from dataclasses import replace

import numpy as np
import pytest

from pytest_fp8.stats.components import MEASURED
from pytest_fp8.stats.estimate import estimate_of, level, log_ratios, spread
from pytest_fp8.stats.looks import (
    ALPHA,
    BASELINE_BLOCKS,
    BETA,
    GATE,
    GATED_CASES,
    POWER,
    Looks,
    against_floor,
    against_history,
    holds,
    processes_hold,
)
from pytest_fp8.verdicts import Verdict

BASE = math.log(1.13)
WITHIN = 0.007
"""Spread between the blocks of one process, as in most cases measured on H200s; between processes and sessions it is
what :data:`MEASURED` says."""
TOLERANCE = 0.02
KNOWN = replace(MEASURED, sessions=100)
"""As known as after four sessions of thirty cases."""
QUIET = replace(MEASURED, session=0.001, sessions=100)


def session(rng, processes, blocks, change=0.0, session=MEASURED.session, within=WITHIN):
    centre = BASE + math.log1p(change) + rng.normal(0, session)
    each = centre + rng.normal(0, MEASURED.process, (processes, 1))
    return (each + rng.normal(0, within, (processes, blocks))).tolist()


def history_of(rng, sessions, **how):
    return [session(rng, 4, BASELINE_BLOCKS, **how) for _ in range(sessions)]


def gate(rng, change, stored=4, cases=GATED_CASES, tolerance=TOLERANCE, components=KNOWN, **how):
    """One gate of one case, with all its looks; the history is drawn anew, as a real one is."""
    history = history_of(rng, stored, **how)
    taken = session(rng, GATE.pairs[-1], GATE.blocks, change, **how)
    for pairs in GATE.pairs:
        verdict = against_history(
            taken[:pairs], history, components=components, tolerance=tolerance, cases=cases
        ).verdict
        if verdict is not Verdict.INCONCLUSIVE:
            break
    return verdict


def rate(change, *verdicts, repeats=500, **how):
    rng = np.random.default_rng(12)
    return np.mean([gate(rng, change, **how) in verdicts for _ in range(repeats)])


@pytest.mark.parametrize("stored", [1, 4])
def test_a_session_of_thirty_healthy_cases_fails_less_often_than_alpha(stored):
    # A rate of 0.01 / 30 per case: 2000 cases would show less than one failure.
    assert rate(0.0, Verdict.FAIL, Verdict.IMPROVED, repeats=2000, stored=stored) <= 2 * ALPHA / GATED_CASES + 0.001


@pytest.mark.nightly
def test_what_is_gated_on_busy_time_fails_as_rarely_and_shows_what_it_can_hold():
    """Sessions differ more there, and a process has 26 steps. So far seven degrees of freedom say by how much."""
    busy = {"components": MEASURED.of_busy(), "session": MEASURED.busy, "within": 0.015, "tolerance": 0.024}
    assert rate(0.0, Verdict.FAIL, repeats=2000, **busy) <= 0.001
    assert rate(0.0, Verdict.PASS, **busy) > 0.95
    assert rate(-0.08, Verdict.FAIL, **busy) > 0.9
    like_steps = {**busy, "components": replace(MEASURED, session=0.0028, sessions=23)}
    assert rate(0.0, Verdict.FAIL, repeats=2000, **like_steps) > 10 * ALPHA / GATED_CASES, "so it has its own part"


def test_a_healthy_case_is_rarely_left_undecided():
    assert rate(0.0, Verdict.PASS) > 0.98
    assert rate(0.0, Verdict.PASS, stored=1) > 0.95


@pytest.mark.parametrize("stored", [pytest.param(1, marks=pytest.mark.nightly), 4])
def test_a_loss_of_what_is_gated_on_rarely_passes(stored):
    history = history_of(np.random.default_rng(0), stored)
    loss = max(TOLERANCE, holds(history, KNOWN))
    assert rate(-loss, Verdict.PASS, stored=stored) <= BETA + 0.02


@pytest.mark.parametrize(("change", "power"), [(-0.03, 0.97), pytest.param(-0.08, 0.99, marks=pytest.mark.nightly)])
def test_a_real_regression_fails_with_four_sessions_stored(change, power):
    assert rate(change, Verdict.FAIL, repeats=300) >= power


def test_what_a_history_is_said_to_hold_it_holds():
    for stored in (1, 4):
        loss = holds(history_of(np.random.default_rng(0), stored, within=0.004), KNOWN)
        caught = rate(-loss, Verdict.FAIL, stored=stored, tolerance=loss, within=0.004)
        assert caught == pytest.approx(POWER, abs=0.08)


@pytest.mark.parametrize(("cases", "looks"), [(1, 1), (1, 3), (30, 4), (0, 2)])
def test_the_looks_of_all_cases_spend_alpha_between_them(cases, looks):
    how = Looks(tuple(range(1, looks + 1)), 6)
    each = [how.finding_chance(cases, how.last(pairs)) for pairs in how.pairs]
    assert max(1, cases) * sum(each) == pytest.approx(ALPHA)
    assert each[-1] > 0.9 * sum(each), "more processes hardly change a finding, so the last look keeps the power"


def test_a_real_gain_is_called_improved():
    assert rate(+0.04, Verdict.IMPROVED, repeats=200) >= 0.95


def test_what_a_case_is_gated_at_does_not_depend_on_how_soon_it_passes():
    stored = [[[0.0, 0.004, -0.004, 0.002] * 2] * 2]
    early, late = (against_history([[0.0] * blocks], stored).tolerance for blocks in (3, 6))
    assert early == late > 0.02


def test_a_history_stands_for_the_mean_of_its_sessions_whatever_they_weigh():
    assert level([[[0.1, 0.2, 0.9], [0.3] * 3], [[0.05] * 3]]) == pytest.approx((0.25 + 0.05) / 2)


def test_sessions_that_spread_more_than_the_pooled_ones_widen_a_case_s_own_error():
    calm = [[[x] * 8] * 2 for x in (0.0, 0.001, -0.001, 0.0)]
    wild = [[[10 * x[0][0]] * 8, [10 * x[0][0]] * 8] for x in calm]
    run = [[0.0] * 6] * 4
    assert estimate_of(run, wild, KNOWN).error > 1.3 * estimate_of(run, calm, KNOWN).error
    assert estimate_of(run, calm, KNOWN).error == pytest.approx(estimate_of(run, calm[:1] * 4, KNOWN).error)


def test_processes_that_differ_more_than_the_pooled_ones_widen_a_case_s_own_error():
    def found(apart):
        processes = [[apart * x] * 6 for x in (-1, 1, -1, 1)]
        return spread(processes, [processes] * 2, MEASURED)

    usual, wild = found(0.001), found(0.02)
    assert usual.run == pytest.approx(found(0.0).run)
    assert wild.run == pytest.approx(0.02**2 * 12 / 9)
    assert wild.stored == pytest.approx(wild.run)


def test_noise_that_only_the_run_shows_counts_in_full_for_the_run():
    calm, noisy = [[[-0.001, 0.001] * 6] * 8], [[-0.02, 0.02] * 3] * 2
    found = spread(noisy, calm, MEASURED)
    assert found.run == pytest.approx(spread(noisy, [], MEASURED).run)
    assert found.stored < found.run / 2


def test_the_blocks_of_a_history_say_more_than_its_few_processes():
    # Four processes that agree by luck do not make a launch-bound case fit to gate.
    lucky = [[BASE - 0.03, BASE + 0.03] * 4] * 4
    assert processes_hold(lucky) > 1.5 * TOLERANCE
    assert processes_hold([[BASE - 0.003, BASE + 0.003] * 4] * 4) < TOLERANCE < holds([lucky], KNOWN)


def test_a_slowdown_common_to_both_arms_cancels():
    bf16, fp8 = np.full(12, 100.0), np.full(12, 80.0)
    assert log_ratios(bf16 * 1.1, fp8 * 1.1) == pytest.approx(log_ratios(bf16, fp8))


def test_a_linear_drift_cancels_within_a_block():
    # ABBA at times 0, 1, 2, 3: the arms' mean times are equal.
    drift = np.exp(0.01 * np.arange(4))
    [x] = log_ratios([100 * drift[0], 100 * drift[3]], [80 * drift[1], 80 * drift[2]])
    assert x == pytest.approx(math.log(100 / 80))


LOST, WILD = [[math.log(0.97)] * 6] * 4, [[-0.15] * 6, [-0.15] * 6, [0.01] * 6, [-0.15] * 6]
STILL = [[[0.0] * 8] * 4] * 4


@pytest.mark.parametrize(
    ("run", "tolerance", "verdict"),
    [
        (LOST, 0.02, Verdict.FAIL),
        (LOST, 0.08, Verdict.PASS),
        ([[-0.5] * 6], 0.02, Verdict.INCONCLUSIVE),
        (WILD, 0.02, Verdict.INCONCLUSIVE),
        ([[0.0, 0.0, -1.0, 0.0, 0.0, 0.0]], 0.03, Verdict.PASS),
    ],
    ids=["lost", "within a wide tolerance", "one process", "one that disagrees", "one wild block"],
)
def test_what_a_run_proves_against_a_history(run, tolerance, verdict):
    assert against_history(run, STILL, components=QUIET, tolerance=tolerance).verdict is verdict


@pytest.mark.parametrize(("pairs", "floor", "verdict"), [(4, 1.0, "FAIL"), (4, 0.8, "PASS"), (1, 1.0, "INCONCLUSIVE")])
def test_a_floor_is_asked_of_the_run_alone(pairs, floor, verdict):
    assert against_floor([[math.log(0.9)] * 6] * pairs, floor).verdict == verdict
