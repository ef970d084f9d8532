"""The statistics: quantiles, variance components, the rules of speed and of the loss. What they say, against published
tables, by simulation how often they are wrong, and what holds for all values."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.gate.__main__ import BASELINES, histories, on_busy_time, stored_in
from helpers.baselines import baseline
from helpers.baselines import session as stored_session
from pytest_fp8.baselines.record import Baseline
from pytest_fp8.baselines.review import compare_metric
from pytest_fp8.baselines.store import Folder, components_in, estimated, write_baseline
from pytest_fp8.stats.components import MEASURED, estimate
from pytest_fp8.stats.estimate import estimate_of, level, log_ratios, spread
from pytest_fp8.stats.looks import (
    ALPHA,
    BASELINE_BLOCKS,
    BESIDE,
    BETA,
    GATE,
    GATED_CASES,
    POWER,
    Looks,
    against_base,
    against_floor,
    against_history,
    holds,
    processes_hold,
)
from pytest_fp8.stats.loss import (
    LOSS_ALPHA,
    LOSS_CONFIDENCE,
    MAX_LOSS_SEEDS,
    OF_NOISE,
    decide_loss,
    root_mean_square,
)
from pytest_fp8.stats.quantiles import (
    chi_square_cdf,
    chi_square_quantile,
    robust_sigma,
    robust_variance,
    sample_sd,
    student_cdf,
    student_quantile,
)
from pytest_fp8.verdicts import Verdict

# -- quantiles --------------------------------------------------------------------------------------------------------


# Student's t, upper 95 % and 99 % points (Abramowitz & Stegun, table 26.10).
@pytest.mark.parametrize(
    ("p", "df", "value"), [(0.95, 1, 6.314), (0.95, 7, 1.895), (0.99, 2, 6.965), (0.99, 30, 2.457)]
)
def test_student_quantiles_are_those_of_the_table(p, df, value):
    assert student_quantile(p, df) == pytest.approx(value, abs=6e-4)


# Chi-square, lower and upper 2.5 % points (Abramowitz & Stegun, table 26.8).
@pytest.mark.parametrize(
    ("df", "low", "high"), [(1, 0.000982, 5.02389), (3, 0.215795, 9.34840), (100, 74.2219, 129.561)]
)
def test_chi_square_quantiles_are_those_of_the_table(df, low, high):
    assert chi_square_quantile(0.025, df) == pytest.approx(low, rel=1e-3)
    assert chi_square_quantile(0.975, df) == pytest.approx(high, rel=1e-5)


@pytest.mark.parametrize("count", [*range(2, 12)])
def test_robust_spreads_are_those_of_normal_values_and_ignore_an_outlier(count):
    samples = np.random.default_rng(0).normal(0, 2.0, (5000, count))
    for spread_of, value in ((robust_sigma, 2.0), (robust_variance, 4.0)):
        assert np.mean([spread_of(values) for values in samples]) == pytest.approx(value, rel=0.04)
        assert spread_of([1.0]) == 0.0
        assert spread_of([*samples[:99, 0], 1e9]) < 2 * value


def test_a_sample_s_standard_deviation_is_none_of_one_value_and_nan_of_what_is_not_finite():
    assert sample_sd([1.0, 3.0]) == pytest.approx(math.sqrt(2))
    assert sample_sd([1.0]) == 0.0
    assert math.isnan(sample_sd([1.0, math.nan]))


# -- the speed rule ---------------------------------------------------------------------------------------------------

BASE = math.log(1.13)
WITHIN = 0.007
"""Spread between the blocks of one process, as in most cases measured on H200s; between processes and sessions it is
what :data:`MEASURED` says."""
TOLERANCE = 0.02
KNOWN = replace(MEASURED, sessions=100)
"""As known as after four sessions of thirty cases."""
QUIET = replace(MEASURED, session=0.001, sessions=100)


def session(rng, processes, blocks, change=0.0, session=MEASURED.session, process=MEASURED.process, within=WITHIN):
    centre = math.log1p(change) + rng.normal(0, session)
    each = centre + rng.normal(0, process, (processes, 1))
    return (each + rng.normal(0, within, (processes, blocks))).tolist()


def history_of(rng, sessions, **how):
    return [session(rng, 4, BASELINE_BLOCKS, **how) for _ in range(sessions)]


def decided(looks, decide):
    """What the first look that decides does; of the last one in any case."""
    for pairs in looks.pairs:
        if (verdict := decide(pairs)) is not Verdict.INCONCLUSIVE:
            break
    return verdict


def gate(rng, change, stored=4, tolerance=TOLERANCE, **how):
    """One gate of one case, with all its looks; the history is drawn anew, as a real one is."""
    history = history_of(rng, stored, **how)
    taken = session(rng, GATE.pairs[-1], GATE.blocks, change, **how)
    told = {"components": KNOWN, "tolerance": tolerance}
    return decided(GATE, lambda pairs: against_history(taken[:pairs], history, **told).verdict)


def beside(rng, change, between):
    """One comparison of base and head with all its looks; blocks spread as measured on H200s."""
    taken = session(rng, BESIDE.pairs[-1], BESIDE.blocks, change, 0.0, between, 0.0075)
    return decided(BESIDE, lambda pairs: against_base(taken[:pairs], 0.01).verdict)


def rate(of, change, *verdicts, repeats=500, **how):
    rng = np.random.default_rng(12)
    return np.mean([of(rng, change, **how) in verdicts for _ in range(repeats)])


CLOSE, APART = {"between": 0.0015, "repeats": 1000}, {"between": 0.003, "repeats": 1000}


@pytest.mark.parametrize(
    ("of", "change", "verdicts", "how", "least", "most"),
    [
        # A rate of 0.01 / 30 per case: 2000 cases would show less than one failure.
        (gate, 0.0, ["FAIL", "IMPROVED"], {"stored": 1, "repeats": 2000}, 0, 2 * ALPHA / GATED_CASES + 0.001),
        (gate, 0.0, ["PASS"], {}, 0.98, 1),
        (gate, -0.03, ["FAIL"], {"repeats": 300}, 0.97, 1),
        (gate, 0.04, ["IMPROVED"], {"repeats": 200}, 0.95, 1),
        (beside, 0.0, ["FAIL"], CLOSE, 0, ALPHA),
        (beside, 0.0, ["PASS", "IMPROVED"], APART, 0.99, 1),
        (beside, -0.01, ["PASS"], CLOSE, 0, BETA),
        (beside, -0.01, ["FAIL"], CLOSE, 0.95, 1),
        (beside, -0.02, ["FAIL"], CLOSE, 0.99, 1),
    ],
)
def test_a_speed_is_judged_right_as_often_as_it_says(of, change, verdicts, how, least, most):
    assert least <= rate(of, change, *verdicts, **how) <= most


def test_what_a_history_is_said_to_hold_it_holds():
    for stored in (1, 4):
        loss = holds(history_of(np.random.default_rng(0), stored, within=0.004), KNOWN)
        caught = rate(gate, -loss, "FAIL", stored=stored, tolerance=loss, within=0.004)
        assert caught == pytest.approx(POWER, abs=0.08)


@pytest.mark.parametrize(("cases", "looks"), [(1, 1), (1, 3), (30, 4), (0, 2)])
def test_the_looks_of_all_cases_spend_alpha_between_them(cases, looks):
    how = Looks(tuple(range(1, looks + 1)), 6)
    each = [how.finding_chance(cases, how.last(pairs)) for pairs in how.pairs]
    assert max(1, cases) * sum(each) == pytest.approx(ALPHA)
    assert each[-1] > 0.9 * sum(each), "more processes hardly change a finding, so the last look keeps the power"


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


def test_the_blocks_of_a_history_say_more_than_its_few_processes():
    # Four processes that agree by luck do not make a launch-bound case fit to gate.
    lucky = [[BASE - 0.03, BASE + 0.03] * 4] * 4
    assert processes_hold(lucky) > 1.5 * TOLERANCE
    assert processes_hold([[BASE - 0.003, BASE + 0.003] * 4] * 4) < TOLERANCE < holds([lucky], KNOWN)


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


def test_a_gain_that_one_pair_does_not_show_passes_at_the_last_look():
    """Any loss of 1 % is excluded, and there is no further pair to ask."""
    pairs = [[0.012 + 0.0005 * k for k in range(-5, 5)] for _ in range(BESIDE.pairs[-1] - 1)]
    pairs.append([-0.0005] * 10)
    assert against_base(pairs, 0.01).verdict is Verdict.PASS
    assert against_base(pairs[:5] * 2, 0.01).verdict is Verdict.IMPROVED


# -- the loss rule ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("noise", "fall", "margin"), [(0.0, 1.0, 0.02), (0.1, 1.0, 0.1), (0.1, 0.2, 0.05), (0.1, -1, 0.02)]
)
def test_the_margin_is_the_noise_within_its_bounds(noise, fall, margin):
    assert decide_loss([0.0, 0.0], 0.02, noise, fall).margin == pytest.approx(margin)


def test_losses_that_decide_nothing_ask_for_seeds():
    assert decide_loss([0.0, 0.03, 0.01], 0.02).verdict is Verdict.INCONCLUSIVE
    assert decide_loss([0.001], 0.02).verdict is Verdict.INCONCLUSIVE, "one seed has no spread"


def loss_gate(rng, gap, sd, noise=0.0, gives_up=True):
    """The verdict, and the seeds that it took. They are added one by one while they do not decide, and may, as the
    plugin adds them. ``noise``: the spread of the reference's noisy curves, as many, which are the yardstick then; else
    a margin of 0.02 is. ``gives_up``: whether looking ends where further seeds are not likely to decide."""
    reference = rng.spawn(1)[0]
    gaps, moved = list(rng.normal(gap, sd, 3)), list(reference.normal(0, noise, 3))
    while True:
        yardstick = OF_NOISE * root_mean_square(moved)
        found = decide_loss(gaps, 1e-9 if noise else 0.02, yardstick)
        if found.verdict is not Verdict.INCONCLUSIVE or len(gaps) >= MAX_LOSS_SEEDS or (gives_up and found.hopeless):
            return found.verdict, len(gaps)
        gaps.append(rng.normal(gap, sd))
        moved.append(reference.normal(0, noise))


@pytest.mark.parametrize(
    ("gap", "verdict", "sd", "noise", "least", "most"),
    [
        # 0.004 nats is the spread between seeds seen at 1B, 0.03 that of 8B.
        (0.0, Verdict.FAIL, 0.004, 0, 0, LOSS_ALPHA),
        (0.0, Verdict.FAIL, 0.03, 0, 0, LOSS_ALPHA),
        # Just at the margin; over all looks. 1500 cases are +-0.011.
        (0.02, Verdict.FAIL, 0.004, 0, 0, 1.5 * LOSS_ALPHA),
        (0.02, Verdict.PASS, 0.004, 0, 0, 1.3 * (1 - LOSS_CONFIDENCE)),
        # Three per cent of 2.7 nats.
        (0.08, Verdict.FAIL, 0.004, 0, 0.99, 1),
        (0.002, Verdict.PASS, 0.004, 0, 0.95, 1),
        # In units of a yardstick's own spread: sound FP8, as far as sound FP8 was seen, planted faults.
        (0.0, Verdict.FAIL, 1, 1, 0, 0.001),
        (1.6, Verdict.FAIL, 1, 1, 0, LOSS_ALPHA),
        (0.0, Verdict.PASS, 1, 1, 0.95, 1),
        (6, Verdict.FAIL, 1, 1, 0.7, 1),
    ],
)
def test_a_loss_is_judged_right_as_often_as_it_says(gap, verdict, sd, noise, least, most):
    rng = np.random.default_rng(3)
    assert least <= np.mean([loss_gate(rng, gap, sd, noise)[0] is verdict for _ in range(1500)]) <= most


@pytest.mark.parametrize(
    ("gap", "sd", "least", "most"),
    [
        # Spreads of one, two and five margins: seeds that are taken.
        (0.0, 0.02, 5, 6.5),
        (0.0, 0.04, 4, 5.5),
        (0.0, 0.10, 3, 5),
        # A loss that is too high by five times the margin, and its spread twice that.
        (0.1, 0.04, 5, 8),
    ],
)
def test_seeds_that_cannot_decide_are_not_trained_and_cost_no_verdict(gap, sd, least, most):
    def simulated(gives_up):
        return [loss_gate(np.random.default_rng(each), gap, sd, gives_up=gives_up) for each in range(1500)]

    soon, late = simulated(True), simulated(False)
    assert least <= np.mean([seeds for _, seeds in soon]) <= most
    lost = [one for (one, _), (two, _) in zip(soon, late, strict=True) if one is not two]
    assert len(lost) <= 0.01 * len(late)
    assert {Verdict.INCONCLUSIVE}.issuperset(lost)


def test_seeds_that_are_judged_once_spend_the_whole_of_each_chance():
    """Above eight seeds there is one look, for a PASS as for a FAIL."""
    gaps = [0.021 + 0.012 * x for x in (1, -0.6, 1.4, 0.2, 1.8, -0.2, 1.2, 0.9, 1.1)]
    error = np.std(gaps, ddof=1) / 3
    proven = (np.mean(gaps) - 0.02) / error
    assert student_quantile(1 - LOSS_ALPHA, 8) < proven < student_quantile(1 - LOSS_ALPHA / 6, 8)
    assert decide_loss(gaps, 0.02).verdict is Verdict.FAIL


# -- variance components ----------------------------------------------------------------------------------------------

SESSION, PROCESS, BLOCK = 0.004, 0.002, 0.007
NAMES = ("monday", "tuesday", "friday", "sunday")


def drawn(seed=0, cases=40, names=NAMES):
    """Histories of cases at levels of their own."""
    rng, found = np.random.default_rng(seed), []
    for _ in range(cases):
        change = rng.uniform(-0.2, 0.2)
        found.append({name: session(rng, 4, 8, change, SESSION, PROCESS, BLOCK) for name in names})
    return found


def test_components_are_found_again():
    found = estimate(drawn(seed=1), prior=None)
    assert found.session == pytest.approx(SESSION, rel=0.15)
    assert found.process == pytest.approx(PROCESS, rel=0.3)
    assert found.block == pytest.approx(BLOCK, rel=0.05)
    assert (found.sessions, found.processes) == (120, 480)


def test_one_wild_case_in_ten_hardly_moves_them():
    histories = drawn()
    for history in histories[:3]:
        for name, session in history.items():
            wild = 20 * (NAMES.index(name) - 1.5) * SESSION
            history[name] = [[x + wild for x in process] for process in session]
    assert estimate(histories, prior=None).session < 1.6 * SESSION


def test_few_sessions_fall_back_on_what_was_measured_so_far():
    one = estimate(drawn(names=NAMES[:1]))
    assert (one.session, one.sessions) == (MEASURED.session, MEASURED.sessions)
    assert one.process == pytest.approx(PROCESS, rel=0.4)
    two = estimate(drawn(cases=2, names=NAMES[:2]))
    assert two.sessions == MEASURED.sessions + 2
    many = estimate(drawn())
    assert abs(many.session - SESSION) < abs(many.session - MEASURED.session)
    assert estimate([]) == MEASURED


def busy_baseline(ratios):
    sessions = [{"busy_speedup": [[math.log(ratio)] * 26] * 2, "speedup": [[0.0] * 8] * 2} for ratio in ratios]
    stored = [stored_session(metrics, run=f"{k:012x}") for k, metrics in enumerate(sessions)]
    return Baseline("1b-te-current", "0" * 16, "h200", tuple(stored))


def test_few_busy_times_of_a_gpu_s_own_leave_what_was_measured_so_far():
    found = estimated([busy_baseline([1.193, 1.204, 1.181, 1.199])])
    assert (found.busy, found.busy_sessions) == (MEASURED.busy, MEASURED.busy_sessions)
    assert (found.session, found.sessions) == (MEASURED.session, MEASURED.sessions), "no step time is among them"
    assert (found.block, found.blocks) == (MEASURED.block, MEASURED.blocks), "nor a block"
    many = estimated([busy_baseline([1.0, 1.01] * 4), busy_baseline([1.2, 1.21] * 4)])
    assert many.busy_sessions == 14
    assert many.busy == pytest.approx(0.0053, rel=0.2)


def test_what_sessions_of_busy_times_differ_by_is_noise_to_an_update_and_to_a_gate():
    """Transformer Engine at 1B on three H200s, whose hosts let its steps wait by different times."""
    first, second, third = ([[math.log(ratio)] * 26] * 2 for ratio in (1.193, 1.204, 1.181))
    assert not compare_metric("busy_speedup", [first, second], third).moved
    assert compare_metric("speedup", [first, second], third).moved
    lost = [[math.log(1.181)] * 26] * 4
    of_steps, of_busy = (against_history(lost, [first, second], components=c) for c in (MEASURED, MEASURED.of_busy()))
    assert of_busy.verdict is Verdict.PASS
    assert of_busy.tolerance > of_steps.tolerance


def test_what_was_measured_first_agrees_with_what_the_repository_s_data_say_today():
    every, on_busy = histories(), on_busy_time(stored_in(BASELINES))
    found = estimate(list(every.values()), prior=None)
    # A busy time is a single step's, which scatters more than blocks do.
    of_steps = estimate([sessions for case, sessions in every.items() if case not in on_busy], prior=None)
    assert found.session == pytest.approx(MEASURED.session, rel=0.2)
    assert of_steps.block == pytest.approx(MEASURED.block, rel=0.25), (
        "later blocks agree better: those of 8B's long steps"
    )
    assert 0 < found.process <= MEASURED.process, "later processes agree better"


def test_a_gpu_s_components_are_of_its_own_histories(tmp_path):
    [history] = drawn(cases=1, names=NAMES[:1])
    mine = baseline("1b-x", "0" * 16, metrics={"speedup": [[x - 0.1 for x in each] for each in history["monday"]]})
    write_baseline(tmp_path, mine)
    alone = components_in(Folder(tmp_path), "h200")
    assert alone == estimated([mine]) != MEASURED
    write_baseline(tmp_path, replace(mine, gpu="h100", case="1b-y"))
    (tmp_path / "h200" / "1b-z.json").write_text("{")
    assert components_in(Folder(tmp_path), "h200") == alone, "the tests of a file that cannot be read fail with it"
    assert components_in(Folder(tmp_path), "l40s") == MEASURED


# -- what holds for all values: of statistics, and of the rules of speed and loss --------------------------------------

settings.register_profile("here", deadline=None, max_examples=30, derandomize=True, database=None)
settings.load_profile("here")

shares, freedom = st.floats(0.001, 0.999), st.integers(1, 300)
ratios = st.floats(-0.2, 0.2)
gaps = st.lists(st.floats(-0.2, 0.2), min_size=1, max_size=8)
factors = st.floats(1e-6, 1e6)
milliseconds = st.lists(st.floats(1, 1e4), min_size=2, max_size=12).map(lambda times: times[: len(times) // 2 * 2])


def drawn_sessions(most):
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


@given(drawn_sessions(6), st.lists(drawn_sessions(4), min_size=1, max_size=4), st.floats(0.005, 0.1), st.integers())
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


@given(drawn_sessions(6), st.floats(0.005, 0.1), st.floats(0, 0.3))
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


@given(drawn_sessions(3), drawn_sessions(6), st.lists(drawn_sessions(4), min_size=1, max_size=4))
def test_what_a_case_is_gated_at_does_not_depend_on_what_its_run_shows(one, other, history):
    assert against_history(one, history).tolerance == against_history(other, history).tolerance
