"""What holds for all values: of statistics, rules of speed and loss, ranks, stored baselines and cases."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

pytest.importorskip("hypothesis")

from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.baselines import baseline
from pytest_fp8 import Case
from pytest_fp8.arms.merging import merged
from pytest_fp8.baselines.record import from_text, to_text
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


@given(st.floats(-50, 50), st.floats(0, 10), freedom)
def test_student_s_distribution_is_symmetric_and_rises(t, more, df):
    assert student_cdf(t, df) + student_cdf(-t, df) == pytest.approx(1)
    assert student_cdf(t, df) <= student_cdf(t + more, df) + 1e-12


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


# -- ranks ------------------------------------------------------------------------------------------------------------

sends = st.lists(
    st.tuples(st.sampled_from(["all-gather", "reduce-scatter", "all-reduce"]), st.floats(0.1, 5)), max_size=6
)
late = st.lists(st.floats(0, 20), min_size=6, max_size=6)


def rank(own, collectives, waits, idle):
    """What a rank says of one step, in ms. ``waits``: how much longer its collectives took, since another came late."""
    each = [(kind, ms + wait) for (kind, ms), wait in zip(collectives, waits, strict=False)]
    busy = own + sum(ms for _, ms in each)
    return {"step_ms": [busy + idle], "busy_ms": [busy], "compute_ms": [own], "collectives": [each]}


@given(st.floats(50, 500), sends, late, late)
def test_late_ranks_change_nothing_of_what_the_gpus_work_and_no_order_of_ranks_does(own, sent, first, second):
    """Of two ranks one is late for each collective: its GPU is idle while the other's waits."""
    waits = [max(one - two, 0.0) for one, two in zip(first, second, strict=True)][: len(sent)]
    others = [max(two - one, 0.0) for one, two in zip(first, second, strict=True)][: len(sent)]
    ranks = [rank(own, sent, waits, sum(others)), rank(own, sent, others, sum(waits))]
    told = merged("busy", ranks)
    assert told["busy_ms"] == pytest.approx([own + sum(ms for _, ms in sent)])
    assert told["busy_ms"][0] <= told["step_ms"][0] + 1e-9
    assert merged("busy", ranks[::-1])["busy_ms"] == pytest.approx(told["busy_ms"])


metrics = st.fixed_dictionaries(
    {"fp8_share": st.lists(st.floats(0, 1), min_size=1, max_size=4)},
    optional={"loss_gap": st.lists(st.floats(-1, 1), min_size=1, max_size=8), "speedup": sessions(4)},
)


@given(metrics, st.dates(), st.text(min_size=1, max_size=40))
def test_a_baseline_is_read_back_as_it_was_written(values, date, reason):
    kept = baseline("1b-torchao-rowwise", "abc", metrics=values, date=f"{date}", reason=reason)
    assert from_text(to_text(kept)) == kept
    assert from_text(to_text(kept).encode()) == kept


@given(st.integers(1, 64), st.integers(1, 4096), st.integers(1, 8))
def test_equal_cases_have_one_id_and_others_have_others(batch, seq, more):
    case = Case("1b", "te", "delayed", batch=batch, seq=seq)
    assert (case.id, case.digest()) == (replace(case).id, replace(case).digest())
    other = replace(case, batch=batch + more)
    assert other.id != case.id
    assert other.digest() != case.digest()
