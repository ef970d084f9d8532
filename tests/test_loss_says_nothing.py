"""Losses that say little of FP8: of both signs, diverging, learnt by heart, at zero, or one number in all steps."""

import pytest

from helpers.falling import STEPS, decided, falling, signed
from pytest_fp8 import Verdict
from pytest_fp8.codes import C
from pytest_fp8.questions.loss.evidence import Curve


def test_a_loss_of_both_signs_never_fails_and_says_why_it_is_undecided():
    decision = decided(signed(0.05), signed())
    assert decision.verdict is Verdict.INCONCLUSIVE, decision.message
    assert "changes sign" in decision.message
    assert "one sign" in decision.message


@pytest.mark.parametrize(
    ("curve", "rises"),
    [
        ([0.8, *(0.8 * 10**t for t in range(1, 8)), *[5e6] * (STEPS - 8)], True),
        ([0.5, 1.7, *[0.3 / (t + 1) for t in range(STEPS - 2)]], False),
        ([0.5, 1.7, *[1e-7] * (STEPS - 2)], False),
        ([0.5] * STEPS, False),
    ],
    ids=["diverges", "a bump at its start", "learnt by heart", "flat"],
)
def test_where_the_reference_diverges_that_is_the_cause(curve, rises):
    def off(by):
        return {s: Curve(s, [x + (0.01 * s + by) * x for x in curve], [1.0 + by] * STEPS) for s in range(3)}

    reference, fp8 = off(0.0), off(1e-4)
    decision = decided(fp8, reference)
    assert (decision.code is C.REFERENCE_RISES) is rises, decision.message
    assert decision.verdict is Verdict.NOT_EXERCISED or not rises


def test_a_loss_learnt_by_heart_is_undecided():
    decision = decided(falling(3e-7, 2.0, wobble=0.001), falling(1e-7))
    assert decision.verdict is Verdict.INCONCLUSIVE, decision.message
    assert "the rest is rounding" in decision.message


def test_a_loss_that_both_arms_bring_to_zero_passes():
    reference = {s: Curve(s, [*(1.0 - 0.1 * t for t in range(10)), *[0.0] * 40], [1.0] * STEPS) for s in range(3)}
    fp8 = {s: Curve(s, [1.001, *c.losses[1:]], [1.1] * STEPS) for s, c in reference.items()}
    assert decided(fp8, reference).verdict is Verdict.PASS


@pytest.mark.parametrize("value", [0.0, 3.25])
def test_a_loss_that_never_moves_is_no_finding_against_fp8(value):
    still = {s: Curve(s, [value] * STEPS, [1.0 + s] * STEPS) for s in range(3)}
    decision = decided(still, still)
    assert decision.verdict is Verdict.INVALID, decision.message
    assert "the same number in every step" in decision.message
    assert "next:" in decision.message


def test_a_loss_of_16_bits_that_moves_by_less_than_they_show_is_not_exercised():
    still = {s: Curve(s, [2.28125] * STEPS, [1.0 + s] * STEPS, eps=2**-7) for s in range(3)}
    decision = decided(still, still)
    assert decision.verdict is Verdict.NOT_EXERCISED, decision.message
    assert "0.016 apart" in decision.message
    assert "logits.float()" in decision.message
    without = {s: Curve(s, [2.28125] * STEPS, [0.0] * STEPS, eps=2**-7) for s in range(3)}
    assert decided(without, without).verdict is Verdict.INVALID, "no gradient: the value is not what is wrong"
