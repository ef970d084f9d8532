"""How many seeds a loss is given, and how often a rule that adds them one by one is wrong: curves drawn at random."""

import math
from collections import Counter

import numpy as np
import pytest

from helpers.curve_pair import CurvePair
from helpers.falling import STEPS, decided, falling, signed
from pytest_fp8 import Case, Verdict
from pytest_fp8.plain import to_plain
from pytest_fp8.questions.loss.evidence import Curve
from pytest_fp8.stats.loss import LOSS_ALPHA, MAX_LOSS_SEEDS, compare_curves, tail_gap


@pytest.mark.parametrize(("seeds", "advice"), [(4, 8), (8, 16)])
def test_more_seeds_are_more_than_there_were(seeds, advice):
    decision = decided(falling(2.0, 1.01, wobble=0.01, start=3.0, seeds=seeds), falling(2.0, start=3.0, seeds=seeds))
    assert decision.verdict is Verdict.INCONCLUSIVE, decision.message
    assert f"seeds={advice})" in decision.message


class Arms(CurvePair):
    """They answer ``curve`` with what they were given, and count."""

    def __init__(self, case, fp8, bf16):
        super().__init__()
        self.case = case
        self.fp8, self.bf16 = Arm(fp8, self.asked), Arm(bf16, self.asked)


class Arm:
    def __init__(self, curves, asked):
        self.curves, self.asked = curves, asked

    def request(self, operation, seed, steps, jitter=False, watch=False):
        self.asked.append((operation, seed))
        return to_plain(self.curves[seed])


def seeds_asked(fp8, bf16):
    """How many seeds are asked while the rule does not decide."""
    arms = Arms(Case("own", "torchao", "tensorwise", emulated=True, seeds=2), fp8, bf16)
    evidence = arms.evidence()
    asked = Counter(seed for _, seed in arms.asked)
    asked -= {seed: 4 if seed in evidence.fp8_twin else 3 for seed in evidence.fp8}
    assert asked in ({}, {1: 1}), "the reference's second curve, which tells whether seeds differ"
    return len(evidence.fp8)


def test_a_loss_near_zero_is_given_the_seeds_that_its_own_margin_needs():
    """Two seeds of a squared error three times as large lie within 0.02 and decide nothing of a loss of 0.0003."""
    fp8, bf16 = falling(0.001, wobble=0.1, seeds=8), falling(0.0003, wobble=0.01, seeds=8)
    assert 2 < seeds_asked(fp8, bf16) <= MAX_LOSS_SEEDS


def test_seeds_that_never_decide_end_at_the_largest_number():
    assert seeds_asked(signed(0.05, seeds=9), signed(seeds=9)) == MAX_LOSS_SEEDS


def test_no_further_seed_is_asked_after_one_that_none_can_mend():
    bf16 = falling(2.0, start=3.0, seeds=8)
    broken = {s: Curve(s, [*c.losses[:-1], math.nan], c.gradient_norms) for s, c in bf16.items()}
    other = {s: Curve(s, c.losses, c.gradient_norms, data=1) for s, c in bf16.items()}
    assert seeds_asked(broken, bf16) == seeds_asked(other, bf16) == 1


def judged(rng, factor, noise, end, seeds=3):
    """The verdict on losses that fall to ``end`` and wander around that by ``noise`` (a share, another for each curve,
    slowly), FP8's ``factor`` times as high; seeds are added one by one while they do not decide."""

    def curve(factor=1.0):
        wandering = np.cumsum(rng.normal(0, noise / np.sqrt(STEPS), STEPS))
        return np.geomspace(1, end, STEPS) * factor * np.exp(wandering)

    fp8, bf16, twin_gaps = [], [], []
    while True:
        reference = curve()
        fp8.append(curve(factor))
        bf16.append(reference)
        twin_gaps.append(tail_gap(curve(), reference))
        if len(bf16) >= seeds:
            verdict = compare_curves(fp8, bf16, twin_gaps).verdict
            if verdict is not Verdict.INCONCLUSIVE or len(bf16) >= MAX_LOSS_SEEDS:
                return verdict


def judged_rate(verdict, factor=1.0, noise=0.01, end=0.003, repeats=600):
    rng = np.random.default_rng(5)
    return np.mean([judged(rng, factor, noise, end) is verdict for _ in range(repeats)])


@pytest.mark.nightly_beyond(2)
@pytest.mark.parametrize("end", [0.5, 3e-3, 3e-6])
@pytest.mark.parametrize("noise", [0.003, 0.03, 0.3])
def test_a_healthy_small_loss_rarely_fails_however_it_wanders(noise, end):
    assert judged_rate(Verdict.FAIL, noise=noise, end=end) <= LOSS_ALPHA


def test_a_small_loss_that_is_half_as_high_again_fails_and_a_like_one_passes():
    assert judged_rate(Verdict.FAIL, factor=1.5) > 0.99
    assert judged_rate(Verdict.FAIL, factor=1.1) > 0.9
    assert judged_rate(Verdict.PASS, factor=1.0) > 0.95


@pytest.mark.nightly
def test_a_gap_as_large_as_the_references_own_drift_is_hardly_ever_called_one(monkeypatch):
    """The margin is 5 % of the loss at most, and BF16 ends 10 % from itself."""
    assert judged_rate(Verdict.FAIL, factor=1.1, noise=0.1) <= LOSS_ALPHA
    monkeypatch.setattr("pytest_fp8.stats.loss.loss_noise", lambda gaps: 0.0)
    assert judged_rate(Verdict.FAIL, factor=1.1, noise=0.1) > LOSS_ALPHA, "the simulation sees what that rule prevents"
