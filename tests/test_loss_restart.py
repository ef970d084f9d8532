"""A reference that keeps something from one curve for the next: named, and healthy scatter left alone."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from helpers.curve_pair import DriftingPair
from helpers.evidence import verdict_of
from helpers.learning import arm, decided
from pytest_fp8.baselines.store import load_baseline
from pytest_fp8.questions.loss.check import check_loss
from pytest_fp8.questions.loss.evidence import Course
from pytest_fp8.questions.loss.restart import HEADLINE
from pytest_fp8.stats.loss import LOSS_MARGIN, MAX_LOSS_SEEDS, LossScale, NoShare
from pytest_fp8.stats.restart import RESTART_ALPHA, decide_restart
from pytest_fp8.verdicts import Verdict

BASELINES = Path(__file__).parents[1] / "baselines"
NATS = LossScale(1.0)
ZERO3 = [-0.12, -0.17, -0.22, -0.15, -0.19]
"""The first three: as far as BF16 ended from itself where ZeRO-3 began with the last curve's small weights, in nats, on
H200s. The others are like them."""
DRAWS = 4000


def ends(by):
    """The reference's curves from moved weights, whose ends lie off by so much, by seed."""
    return {
        s: replace(c, losses=[x + by[s] * (t > 0) for t, x in enumerate(c.losses)])
        for s, c in arm(wobble=0.0, seeds=len(by)).items()
    }


def of_seeds(by, **changes):
    """Decided on as many seeds as ``by`` has, where BF16 ends off itself by it."""
    arms = {"fp8": arm(0.001, seeds=len(by)), "bf16": arm(wobble=0.0, seeds=len(by)), "twin": ends(by)}
    return decided(**{**arms, **changes})


def test_curves_that_end_lower_each_time_are_no_new_beginning():
    decision = of_seeds(ZERO3)
    verdict_of(decision, Verdict.INVALID, HEADLINE, "0.17 below it on average", "-0.22", "from one curve for the next")


def test_it_is_said_before_a_gap_that_may_come_of_it():
    higher = {s: replace(c, losses=[x + 0.2 * (t > 0) for t, x in enumerate(c.losses)]) for s, c in arm(0.001).items()}
    verdict_of(of_seeds([0.0] * 3, fp8=higher), Verdict.FAIL, "ends at a higher loss")
    verdict_of(of_seeds([-0.21, -0.2, -0.22], fp8=higher), Verdict.INVALID, HEADLINE)


@pytest.mark.parametrize("by", [[-0.02, -0.03, -0.04], [0.3, -0.3, 0.2], [-0.4, -0.05, -0.2], [0.21, 0.2, 0.22]])
def test_scatter_small_shifts_and_what_the_rounding_itself_adds_are_left_alone(by):
    verdict_of(of_seeds(by), Verdict.PASS)


def test_other_batches_in_the_second_curve_are_named():
    twin = {s: replace(c, data=7) for s, c in arm().items()}
    verdict_of(decided(twin=twin), Verdict.INVALID, HEADLINE, "checksum 00000007", "iterator")


def with_rates(*rates, offset=0.0):
    return {s: replace(c, course=Course(rates=[[rate] for rate in rates])) for s, c in arm(offset).items()}


def test_a_schedule_that_goes_on_is_named():
    fp8, first, again = with_rates(1e-3, 1e-4, offset=0.001), with_rates(1e-3, 1e-4), with_rates(1e-4, 1e-4)
    verdict_of(decided(fp8=fp8, bf16=first, twin=again), Verdict.INVALID, "began with 0.0001", "optimizer.scheduler")


@pytest.mark.parametrize("begins", [1e-3, 1e-3 * (1 + 2**-9), math.nan], ids=["same", "of the weights", "none"])
def test_one_that_looks_at_the_loss_or_the_weights_is_left_alone(begins):
    fp8, first, again = with_rates(1e-3, 1e-4, offset=0.001), with_rates(1e-3, 1e-4), with_rates(begins, 5e-4)
    verdict_of(decided(fp8=fp8, bf16=first, twin=again), Verdict.PASS)


def one_run(by, batches=lambda seed: 0):
    """Weights that are loaded: the seeds' curves begin one rounding away, and the first one is the twin of all."""
    first = arm(wobble=0.0)[0]
    bf16 = {s: replace(c, losses=c.losses if s else first.losses, data=batches(s)) for s, c in ends(by).items()}
    twin = {s: replace(bf16[0], seed=s) for s in bf16} | {0: replace(ends(by)[0], data=batches(0))}
    fp8 = {s: replace(c, losses=[x + 0.001 for x in c.losses]) for s, c in bf16.items()}
    return decided(fp8=fp8, bf16=bf16, twin=twin, one_curve=True)


def test_seeds_of_one_start_are_compared_with_its_first_run():
    verdict_of(one_run([gap - 0.2 for gap in ZERO3]), Verdict.INVALID, HEADLINE, "0.37 below it on average")
    verdict_of(one_run([-0.2, 0.2, -0.2]), Verdict.PASS)


def test_batches_in_which_no_loss_shows_a_difference_may_differ_between_seeds():
    verdict_of(one_run([0.001, -0.001, 0.002], batches=lambda seed: 1000 + seed), Verdict.PASS)


def test_one_gap_and_a_loss_without_shares_decide_nothing():
    assert decide_restart([-0.5], NATS).anew
    assert decide_restart([], NATS).anew
    assert decide_restart([-3.0, -3.1, -3.2], LossScale(1.0, NoShare.CHANGES_SIGN)).anew


@pytest.mark.parametrize(
    ("again", "asked", "verdict"),
    [
        (lambda seed: -0.3 + 0.06 * (seed % 3), 4, Verdict.INVALID),
        (lambda seed: -0.3 if seed < 2 else 0.2 * (seed % 2), 6, Verdict.PASS),
        (lambda seed: 0.01 * (-1) ** seed, 3, Verdict.PASS),
        (lambda seed: 0.3 - 0.12 * (seed % 3), 3, Verdict.PASS),
    ],
    ids=["lower", "both sides", "close", "higher"],
)
def test_an_end_apart_that_may_be_chance_asks_for_more_seeds(again, asked, verdict):
    arms = DriftingPair(0.001, 0.0, again)
    evidence = arms.evidence()
    assert len(evidence.fp8) == asked
    assert check_loss(evidence).verdict is verdict


def recorded():
    for path in sorted(BASELINES.rglob("[!_]*.json")):
        for session in load_baseline(path).sessions:
            if twins := session.metrics.get("loss_twin_gap", []):
                yield path.stem, twins


def test_no_stored_session_is_said_to_keep_anything():
    stored = list(recorded())
    assert len(stored) > 100
    found = [(name, decide_restart(twins, NATS)) for name, twins in stored]
    assert [name for name, each in found if not each.anew] == []
    assert max(abs(each.gap) for _, each in found) < LOSS_MARGIN[1] / 4


def rate(shift, sigma, one_start=False):
    """Share of simulated cases that are said not to begin anew, with three seeds or more where those leave doubt."""
    random = np.random.default_rng(11)
    said = 0
    for _ in range(DRAWS):
        gaps = list(shift + random.normal(0, sigma, MAX_LOSS_SEEDS) - one_start * random.normal(0, sigma))
        for seeds in range(3, MAX_LOSS_SEEDS + 1):
            found = decide_restart(gaps[:seeds], NATS, one_start)
            if not found.doubtful:
                break
        said += not found.anew
    return said / DRAWS


@pytest.mark.parametrize("one_start", [False, True])
@pytest.mark.parametrize("sigma", [0.004, 0.02, 0.1, 1.0])
def test_false_alarms_stay_within_the_chance_given_to_them(sigma, one_start):
    """0.004 nats are the scatter of the stored sessions; wider scatter is that of models that train at high rates."""
    assert rate(0.0, sigma, one_start) <= RESTART_ALPHA


def test_what_zero3_kept_is_found_at_its_own_scatter():
    assert rate(-0.17, 0.05) > 0.95
