"""What a loss needs to speak of FP8: weights that move, a reference that learns, gradients of two precisions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from helpers.evidence import verdict_of
from helpers.learning import MOVES, arm, decided
from pytest_fp8 import Verdict
from pytest_fp8.questions.loss.evidence import Curve, Moved
from pytest_fp8.stats.loss import loss_fall


def test_arms_that_learn_alike_pass():
    decision = decided()
    verdict_of(decision, Verdict.PASS)
    assert decision.numbers["moved"] > 0.97


def test_a_loss_that_reaches_no_weight_says_nothing_of_fp8():
    """Its gradients are all 0, so that no weight is among those that should move."""
    still = {"moves": {name: Moved(4096, 0.0, 0.0) for name in MOVES}}
    decision = decided(fp8=arm(0.001, **still), bf16=arm(wobble=0.0, **still))
    says = "0.0% after 20 steps; no weight had a gradient other than 0", "does not depend on the weights"
    verdict_of(decision, Verdict.NOT_EXERCISED, *says)


@pytest.mark.parametrize(
    ("down", "says"),
    [
        (Moved(4096, 0.0, 0.0), "gradients are zero or lost"),
        (Moved(4096, 0.0, 1.0), "a learning rate of 0"),
        (Moved(4096, 0.3, 0.3), "1 of 3 weights train only in part"),
    ],
)
def test_a_weight_that_does_not_move_as_in_the_reference_fails(down, says):
    verdict_of(decided(arm(0.001, moves={**MOVES, "down": down})), Verdict.FAIL, says, "98.0% of down")


def test_a_loss_that_stays_up_since_weights_stand_still_is_told_by_these():
    fp8 = {
        s: replace(c, losses=[5.001 + s / 1000] * len(c.losses))
        for s, c in arm(moves={**MOVES, "down": Moved(4096, 0.0, 1.0)}).items()
    }
    verdict_of(decided(fp8), Verdict.FAIL, "1 of 3 weights do not train in the FP8 arm", "a learning rate of 0")


def test_an_expert_that_rests_with_one_seed_is_no_finding():
    fp8 = arm(0.001)
    fp8[1] = replace(fp8[1], movement={**MOVES, "down": Moved(4096, 0.0, 0.0)})
    verdict_of(decided(fp8), Verdict.PASS)


@pytest.mark.parametrize("norm", [Moved(64, 0.9, 1.0), Moved(64, 0.0, 0.0)])
def test_a_small_parameter_decides_nothing(norm):
    """A few elements can be rounded away by chance."""
    verdict_of(decided(arm(0.001, moves={**MOVES, "norm": norm})), Verdict.PASS)


def slow(share):
    return {"up": Moved(10**6, share, 1.0), "head": Moved(10**4, 0.9, 1.0)}


@pytest.mark.parametrize(("share", "verdict"), [(0.077, Verdict.NOT_EXERCISED), (0.30, Verdict.PASS)])
def test_a_rate_that_moves_few_weights_asks_nothing_of_fp8(share, verdict):
    """7.7 % of an 8B model's weights moved at rate 5e-6, 30 % of a 1B model's at 3e-5."""
    decision = decided(arm(0.001, moves=slow(share)), arm(wobble=0.0, moves=slow(share)))
    verdict_of(decision, verdict)
    if verdict is Verdict.NOT_EXERCISED:
        assert "master weights in float32" in decision.message


def test_rows_that_no_gradient_reaches_do_not_count():
    embedding = {**MOVES, "embed": Moved(10**6, 0.003, 0.003)}
    verdict_of(decided(arm(0.001, moves=embedding), arm(wobble=0.0, moves=embedding)), Verdict.PASS)


def test_a_higher_loss_fails_although_few_weights_move():
    drift = {
        s: replace(c, losses=[x + 0.01 * t for t, x in enumerate(c.losses)])
        for s, c in arm(0.001, moves=slow(0.05)).items()
    }
    verdict_of(decided(drift, arm(wobble=0.0, moves=slow(0.05))), Verdict.FAIL, "higher loss than BF16")


def flat(offset=0.0, noise=0.05, slope=0.0, seeds=3, steps=40):
    draws = np.random.default_rng(3)
    every = draws.normal(0, noise, (seeds, steps))
    return {
        s: Curve(s, (2.3 + offset * (1 + s / 9) + every[s] - slope * np.arange(steps)).tolist(), [1.0 + offset] * steps)
        for s in range(seeds)
    }


def test_a_loss_that_does_not_fall_is_never_a_pass():
    verdict_of(decided(flat(0.0005), flat()), Verdict.NOT_EXERCISED, "BF16 learns nothing", "steps")
    rising = decided(flat(0.0005, slope=-0.01), flat(slope=-0.01))
    verdict_of(rising, Verdict.NOT_EXERCISED, "an adversarial one", "it rises by 0.3")
    verdict_of(decided(flat(0.0005, slope=0.01), flat(slope=0.01)), Verdict.PASS)


def test_a_loss_of_noise_is_taken_for_learning_as_rarely_as_it_says():
    rng = np.random.default_rng(1)
    seen = [loss_fall(2.3 + rng.normal(0, 0.05, (3, 40))).learns for _ in range(2000)]
    assert 0.01 < np.mean(seen) < 0.05


def test_equal_losses_with_other_gradients_are_two_precisions():
    """A loss near 60 has one bfloat16 in each 0.25."""
    bf16 = arm(wobble=0.0)
    other = {s: replace(c, gradient_norms=[1.01] * 20) for s, c in bf16.items()}
    verdict_of(decided(other, bf16), Verdict.PASS)
    verdict_of(decided(bf16, bf16), Verdict.FAIL, "bit-equal")
