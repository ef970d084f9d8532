"""Losses of the very first step, before any update: how far apart those of sound arms may lie."""

import numpy as np
import pytest

from helpers.falling import STEPS, decided, falling, signed
from pytest_fp8 import Verdict
from pytest_fp8.questions.loss.check import check_loss
from pytest_fp8.questions.loss.evidence import Curve, LossEvidence


@pytest.mark.parametrize(
    ("factor", "verdict"), [(1.05, None), (1.3, Verdict.INCONCLUSIVE), (2.0, Verdict.FAIL), (0.5, Verdict.FAIL)]
)
def test_first_losses_may_lie_as_far_apart_as_moved_weights_take_the_references(factor, verdict):
    """A recommender's first loss moves by 6 % with weights that are moved as FP8 moves products."""
    reference = falling(2.0, start=4.0, seeds=3)
    fp8 = {s: Curve(s, [factor * c.losses[0], *c.losses[1:]], [1.1] * STEPS) for s, c in reference.items()}
    moved = {s: [c.losses[0] * x for x in (0.93, 1.05, 1.07, 0.95)] for s, c in reference.items()}
    alone = check_loss(LossEvidence(fp8, reference, reference))
    assert "very first step" in alone.message
    decision = check_loss(LossEvidence(fp8, reference, reference, moved_first=moved))
    assert ("very first step" in decision.message) == (verdict is not None), decision.message
    assert verdict in (None, decision.verdict)
    if verdict is not None:
        assert "next:" in decision.message


@pytest.mark.parametrize(("first", "fails"), [(0.03, False), (0.4, True)])
def test_the_first_loss_of_both_signs_may_be_further_apart(first, fails):
    """0.026 apart is 9 % of the curve's largest loss, as seen of a critic's in sound FP8."""
    reference = signed()
    apart = {s: Curve(s, [first, *signed(0.001)[s].losses[1:]], c.gradient_norms) for s, c in reference.items()}
    decision = decided(apart, reference)
    assert ("very first step" in decision.message) == fails, decision.message
    assert (decision.verdict is Verdict.FAIL) == fails


def test_a_first_loss_of_zero_is_compared_with_the_curves_largest():
    path = np.linspace(2, 1, STEPS - 1)
    near = {s: Curve(s, [0.01, *(path + 0.001)], [1.0] * STEPS) for s in range(3)}
    reference = {s: Curve(s, [0.0, *path], [1.0] * STEPS) for s in range(3)}
    assert decided(near, reference).verdict is Verdict.PASS
    far = {s: Curve(s, [0.5, *c.losses[1:]], c.gradient_norms) for s, c in near.items()}
    decision = decided(far, reference)
    assert decision.verdict is Verdict.FAIL
    assert "0.0000 nats within 2% of 2.0000 nats, the curve's largest loss" in decision.message


def test_the_first_step_s_cause_names_state_outside_the_model_and_dropped_behaviour():
    far = {s: Curve(s, [x + 1 for x in c.losses], c.gradient_norms) for s, c in falling(2.0, start=4.0).items()}
    message = decided(far, falling(2.0, start=4.0)).message
    for words in ("very first step", "a counter in a Python attribute", "a subclass's own forward, a hook", "a buffer"):
        assert words in message


@pytest.mark.parametrize("nats", [True, False])
def test_a_first_loss_is_in_nats_where_it_is_a_cross_entropy(nats):
    curves = [{0: Curve(0, [first, 5.0, 4.0, 3.0], [first] * 4)} for first in (12.0, 6.0)]
    decision = check_loss(LossEvidence(*curves, {}, nats=nats))
    assert "very first step" in decision.message
    assert ("nats" in decision.message) is nats
