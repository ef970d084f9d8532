"""How far each arm is from itself, and a loss that is lower than the reference's."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.curve_pair import DriftingPair
from helpers.evidence import verdict_of
from helpers.learning import arm, decided
from pytest_fp8 import Verdict
from pytest_fp8.baselines.store import load_baseline
from pytest_fp8.questions.loss.check import check_loss, judge_gap
from pytest_fp8.questions.loss.evidence import LossEvidence
from pytest_fp8.stats.loss import LOSS_MARGIN, LossScale, decide_loss, loss_margin, loss_noise

BASELINES = Path(__file__).parents[1] / "baselines"


def lower(by):
    return {
        s: replace(c, losses=[x - (by + 0.002 * s if t else 0.0) for t, x in enumerate(c.losses)])
        for s, c in arm(0.001).items()
    }


def test_a_lower_loss_wants_an_explanation():
    decision = decided(lower(0.3))
    verdict_of(decision, Verdict.INCONCLUSIVE, "lower loss than BF16, by more than noise", "a mean over fewer tokens")
    assert decision.numbers["gap"] < -0.3 + 0.01
    verdict_of(decided(lower(0.03)), Verdict.PASS)


@pytest.mark.parametrize("twin", ["twin", "fp8_twin"])
def test_a_lower_loss_within_either_arms_own_spread_passes(twin):
    bf16 = arm(wobble=0.0)
    fp8 = lower(0.3)
    away = {s: replace(c, losses=[x + (0.2, -0.2, 0.1)[s] for x in c.losses]) for s, c in (arm(wobble=0.0)).items()}
    drift = {s: replace(c, losses=[x + (0.2, -0.2, 0.1)[s] for x in c.losses]) for s, c in fp8.items()}
    twins = {"twin": away} if twin == "twin" else {"twin": bf16, "fp8_twin": drift}
    verdict_of(check_loss(LossEvidence(fp8=fp8, bf16=bf16, **twins)), Verdict.PASS)


SCALES = {"own.moe": 0.208}
"""What the margins of an own model are a share of: its reference's loss, which ended below 1 on an H200."""


def recorded():
    """(id, gaps, gaps of BF16 against BF16, scale) of the sound cases that are stored."""
    for path in sorted(BASELINES.rglob("[!_]*.json")):
        stored = load_baseline(path)
        if stored.values("loss_gap"):
            scale = SCALES.get(path.stem.partition("-")[0], 1.0)
            yield path.stem, stored.values("loss_gap"), stored.values("loss_twin_gap"), scale


RECORDED = list(recorded())


@pytest.mark.parametrize(("name", "gaps", "twins", "scale"), RECORDED, ids=[name for name, *_ in RECORDED])
def test_no_sound_case_on_record_is_called_too_low_or_too_high(name, gaps, twins, scale):
    floor = max(LOSS_MARGIN[1] * scale, loss_noise(twins))
    gap = decide_loss(gaps, loss_margin(twins, LossScale(scale)), 0.0, floor)
    assert not gap.below
    assert gap.verdict is not Verdict.FAIL


def test_the_margin_is_of_the_arm_with_more_noise():
    assert loss_margin([0.001], LossScale(1.0), fp8_gaps=[0.012, -0.008]) == pytest.approx(loss_noise([0.012, -0.008]))
    assert loss_margin([0.012, -0.008], LossScale(1.0), fp8_gaps=[0.001]) == pytest.approx(loss_noise([0.012, -0.008]))


@pytest.mark.parametrize(("drift", "verdict"), [(0.0, Verdict.FAIL), (0.014, Verdict.PASS)])
def test_no_gap_fails_before_the_fp8_arms_own_spread_is_known(drift, verdict):
    """0.03 nats are more than the smallest margin, and less than three times 0.014."""
    arms = DriftingPair(0.03, drift)
    evidence = arms.evidence()
    gap = judge_gap(evidence)
    assert gap.verdict is verdict
    assert sorted(evidence.fp8_twin) == [0, 1, 2]


def test_seeds_that_pass_at_once_ask_no_twin_of_the_fp8_arm():
    arms = DriftingPair(0.001, 0.0)
    evidence = arms.evidence()
    gap = judge_gap(evidence)
    assert gap.verdict is Verdict.PASS
    assert not evidence.fp8_twin
    assert ("fp8", 0, True) not in arms.asked


def test_a_stored_margin_asks_no_twin_at_all():
    arms = DriftingPair(0.06, 0.0)
    arms.evidence(lambda evidence: judge_gap(evidence, [0.001] * 3), twin=False)
    assert not any(jitter for _, _, jitter in arms.asked)


def test_a_twin_of_the_fp8_arm_that_overflows_fails():
    bad = arm(0.001)
    bad[1] = replace(bad[1], losses=[*bad[1].losses[:-1], math.nan])
    verdict_of(decided(fp8_twin=bad), Verdict.FAIL, "not finite from step 19 on", "seed 1")
