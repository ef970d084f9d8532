"""What is asked of the arms until their curves decide: seeds one by one, and noise where it is needed."""

import math
from types import SimpleNamespace

import pytest

from helpers.curve_pair import CurvePair
from helpers.two_ledgers import ledgers
from pytest_fp8 import Verdict
from pytest_fp8.pair import Fp8Pair
from pytest_fp8.questions.loss.check import check_loss, judge_gap
from pytest_fp8.questions.loss.evidence import START
from pytest_fp8.stats.loss import MAX_LOSS_SEEDS

SEEDS = [0, 1, 2]


def losses(gap=0.0, spread=0.02, noise=0.0):
    """Losses that fall from 5 nats, ``gap`` off after the first step and a little more with each seed; a noisy curve
    ends ``noise`` off to either side."""

    def of(seed, steps, jitter, noise):
        end = gap * (1 + spread * seed) + (moved * (-1) ** seed if noise is not None else 0.0)
        return [5 + seed / 1e4 - 20 * t / 1000 + end * (t > 0) for t in range(steps)]

    moved = noise
    return of


@pytest.mark.parametrize(
    ("gap", "noise", "verdict", "asked"),
    [
        (0.001, 0.05, Verdict.PASS, []),
        (0.03, 0.0, Verdict.FAIL, SEEDS),
        (0.03, 0.014, Verdict.PASS, SEEDS),
        (-0.2, 0.0, Verdict.INCONCLUSIVE, [*range(MAX_LOSS_SEEDS)]),
    ],
    ids=["within the least margin", "higher", "within noise", "lower"],
)
def test_noise_is_asked_of_the_reference_only_where_a_gap_does_not_pass_without(gap, noise, verdict, asked):
    arms = CurvePair(losses(gap), losses(noise=noise))
    evidence = arms.evidence()
    assert judge_gap(evidence).verdict is verdict
    assert [seed for seed, steps in arms.noisy() if steps == arms.case.steps] == asked


@pytest.mark.parametrize("again", [0.0, 0.05], ids=["the same", "another"])
def test_the_reference_trains_its_first_steps_again_and_with_noise_where_these_differ(again):
    plain, trained = losses(), []

    def bf16(seed, steps, **how):
        trained.append(steps)
        by = again if trained.count(START) == 1 and steps == START else 0.0
        return [x + by * (t > 0) for t, x in enumerate(plain(seed, steps, **how))]

    arms = CurvePair(losses(0.001), bf16)
    evidence = arms.evidence()
    assert [(s, n) for name, s, n, _, noise in arms.asked if n == START and noise is None] == [(0, START)]
    assert arms.noisy() == [(0, START)] * (4 if again else 0)
    assert (check_loss(evidence).verdict is Verdict.INVALID) is bool(again)


def test_seeds_that_scatter_are_added_up_to_the_largest_number():
    arms = CurvePair(lambda seed, steps, **how: losses((-1) ** seed * 0.1)(seed, steps, **how), losses(), seeds=2)
    assert len(arms.evidence().fp8) == MAX_LOSS_SEEDS


def test_no_further_seed_is_asked_after_one_that_none_can_mend():
    def broken(seed, steps, **how):
        return [*losses()(seed, steps, **how)[:-1], math.nan]

    for arms in (CurvePair(broken, losses()), CurvePair(losses(0.001), losses(), data=1)):
        assert len(arms.evidence().fp8) == 1


def test_a_long_look_asks_the_same_curves_over_more_steps():
    pair = CurvePair(losses(), losses())
    assert len(pair.evidence(steps=300).fp8[0].losses) == 300
    assert {steps for _, _, steps, _, _ in pair.asked} == {300, START}


@pytest.mark.parametrize(("steps", "stored"), [(None, 1), (300, 0)])
def test_no_baseline_stores_the_gaps_of_a_long_look(steps, stored):
    pair = CurvePair(losses(), losses())
    asked = SimpleNamespace(loss_evidence=lambda steps: _gathered(pair, steps), _ledgers=_no_ledgers)
    asking = Fp8Pair._loss(asked, steps)
    with pytest.raises(StopIteration) as ended:
        next(asking)
    decision, rows = ended.value.value
    assert decision.numbers["steps"] == (steps or pair.case.steps)
    assert len(rows) == stored


def _gathered(pair, steps):
    return pair.evidence(steps=steps)
    yield


def _no_ledgers():
    return ledgers()
    yield
