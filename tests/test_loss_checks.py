"""The loss question's check on evidence written by hand: healthy, and broken in each way that it must name."""

from __future__ import annotations

import math
from dataclasses import replace

from helpers.evidence import curves, verdict_of
from pytest_fp8 import Verdict
from pytest_fp8.questions.loss.check import check_loss
from pytest_fp8.questions.loss.evidence import Curve, LossEvidence


def loss_evidence(fp8=None, **changes):
    return replace(LossEvidence(fp8=fp8 or curves(0.001), bf16=curves(wobble=0.0)), **changes)


def test_loss_healthy():
    verdict_of(check_loss(loss_evidence()), Verdict.PASS, "over 20 steps of 3 seeds")


def test_nan_at_step_40_is_named_with_the_value_before():
    bad = curves(0.001, steps=50)
    bad[1] = Curve(1, [*bad[1].losses[:39], *[math.nan] * 11], bad[1].gradient_norms)
    decision = check_loss(LossEvidence(fp8=bad, bf16=curves(steps=50, wobble=0.0)))
    verdict_of(decision, Verdict.FAIL, "not finite from step 39 on", "seed 1", f"{bad[1].losses[38]:.4f}")


def test_a_gradient_norm_that_is_not_finite_fails_too():
    bad = curves(0.001)
    bad[0] = Curve(0, bad[0].losses, [1.0, math.inf, *[1.0] * 18])
    verdict_of(check_loss(loss_evidence(bad)), Verdict.FAIL, "gradient norm is not finite from step 1")


def test_a_reference_that_diverges_is_invalid_not_fp8s_fault():
    bad = {s: Curve(s, [math.nan] * 20, [1.0] * 20) for s in range(3)}
    verdict_of(check_loss(loss_evidence(bf16=bad)), Verdict.INVALID, "BF16 arm's loss is not finite")


def test_bit_equal_curves_mean_fp8_was_off():
    verdict_of(check_loss(loss_evidence(curves(wobble=0.0))), Verdict.FAIL, "bit-equal", "FP8 was off")


def test_three_per_cent_of_drift_fails():
    drift = {
        s: Curve(s, [x * (1 + 0.03 * t / 19) for t, x in enumerate(c.losses)], c.gradient_norms)
        for s, c in curves(0.001).items()
    }
    verdict_of(check_loss(loss_evidence(drift)), Verdict.FAIL, "higher loss than BF16")


def test_other_data_shows_at_the_first_step():
    verdict_of(check_loss(loss_evidence(curves(0.5))), Verdict.FAIL, "very first step")


def test_seeds_that_disagree_are_inconclusive():
    far = {
        s: Curve(s, [x + (0.05 * s - 0.03 if t > 2 else 0.001) for t, x in enumerate(c.losses)], c.gradient_norms)
        for s, c in curves().items()
    }
    verdict_of(check_loss(loss_evidence(far)), Verdict.INCONCLUSIVE, "more seeds")


def test_different_data_is_named_before_its_consequences():
    other = {s: replace(curve, data=1 + s) for s, curve in curves(0.5).items()}
    verdict_of(check_loss(loss_evidence(other)), Verdict.FAIL, "trained on different data", "00000001 (FP8)")
