"""What holds for all values: of statistics, and of the rules of speed and loss."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("hypothesis")

from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_fp8.stats.estimate import log_ratios
from pytest_fp8.stats.looks import against_base, against_floor, against_history
from pytest_fp8.stats.loss import decide_loss
from pytest_fp8.stats.quantiles import (
    chi_square_cdf,
    chi_square_quantile,
    robust_sigma,
    robust_variance,
    student_cdf,
    student_quantile,
)
from pytest_fp8.verdicts import Verdict

settings.register_profile("here", deadline=None, max_examples=30, derandomize=True, database=None)
settings.load_profile("here")

shares, freedom = st.floats(0.001, 0.999), st.integers(1, 300)
ratios = st.floats(-0.2, 0.2)
gaps = st.lists(st.floats(-0.2, 0.2), min_size=1, max_size=8)
factors = st.floats(1e-6, 1e6)
milliseconds = st.lists(st.floats(1, 1e4), min_size=2, max_size=12).map(lambda times: times[: len(times) // 2 * 2])


def sessions(most):
    """Pairs of processes, each of as many blocks."""
    blocks = st.shared(st.integers(1, 8), key="blocks")
    process = blocks.flatmap(lambda count: st.lists(ratios, min_size=count, max_size=count))
    return st.lists(process, min_size=1, max_size=most)


def shuffled(values, seed):
    return random.Random(seed).sample(values, len(values))


@given(shares, freedom)
def test_quantiles_are_the_inverse_of_what_they_are_quantiles_of(p, df):
    assert student_cdf(student_quantile(p, df), df) == pytest.approx(p, abs=1e-9)
    assert chi_square_cdf(chi_square_quantile(p, df), df) == pytest.approx(p, abs=1e-9)


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=20), st.floats(-100, 100), st.floats(0.01, 100))
def test_a_spread_does_not_depend_on_where_values_lie_and_has_their_unit(values, by, times):
    moved = [times * value + by for value in values]
    assert robust_sigma(moved) == pytest.approx(times * robust_sigma(values), abs=1e-9 * times)
    assert robust_variance(moved) == pytest.approx(times**2 * robust_variance(values), abs=1e-9 * times**2)


@given(milliseconds, st.data(), factors)
def test_what_slows_both_arms_down_cancels(bf16, data, factor):
    fp8 = data.draw(st.lists(st.floats(1, 1e4), min_size=len(bf16), max_size=len(bf16)))
    slower = log_ratios([factor * time for time in bf16], [factor * time for time in fp8])
    assert slower == pytest.approx(log_ratios(bf16, fp8), abs=1e-9)


@given(sessions(6), st.lists(sessions(4), min_size=1, max_size=4), st.floats(0.005, 0.1), st.integers())
def test_no_order_of_blocks_pairs_and_sessions_changes_what_is_decided(run, history, tolerance, seed):
    again = [shuffled(blocks, seed) for blocks in shuffled(run, seed)]
    earlier = [[shuffled(blocks, seed) for blocks in session] for session in shuffled(history, seed)]
    for rule in (
        lambda run, history: against_history(run, history, tolerance=tolerance),
        lambda run, history: against_floor(run, 1.0),
        lambda run, history: against_base(run, tolerance),
    ):
        one, two = rule(run, history), rule(again, earlier)
        assert one.estimate.theta == pytest.approx(two.estimate.theta, abs=1e-12)
        assert one.tolerance == pytest.approx(two.tolerance)
        assert one.verdict is two.verdict


WORST_FIRST = [Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.PASS, Verdict.IMPROVED]


@given(sessions(6), st.floats(0.005, 0.1), st.floats(0, 0.3))
def test_a_faster_run_and_a_wider_tolerance_are_never_judged_worse(run, tolerance, more):
    def at(run, tolerance):
        return WORST_FIRST.index(against_base(run, tolerance).verdict)

    faster = [[ratio + more for ratio in process] for process in run]
    # A gain that one pair does not show asks for another look.
    assert at(faster, tolerance) >= min(at(run, tolerance), WORST_FIRST.index(Verdict.INCONCLUSIVE))
    assert at(run, tolerance + 0.5) >= at(run, tolerance)


@given(gaps, st.floats(0.001, 0.1), st.floats(0, 0.1), st.integers(), st.sampled_from([2.0**-12, 1.0, 2.0**12]))
def test_a_loss_is_judged_alike_in_any_unit_and_any_order_of_its_seeds(values, least, noise, seed, unit):
    one = decide_loss(values, least, noise, 1.0)
    two = decide_loss([unit * gap for gap in values], unit * least, unit * noise, unit)
    three = decide_loss(shuffled(values, seed), least, noise, 1.0)
    assert one.verdict is two.verdict is three.verdict
    assert two.margin == unit * one.margin


@given(sessions(3), sessions(6), st.lists(sessions(4), min_size=1, max_size=4))
def test_what_a_case_is_gated_at_does_not_depend_on_what_its_run_shows(one, other, history):
    assert against_history(one, history).tolerance == against_history(other, history).tolerance
