"""The loss question's check on evidence written by hand: healthy, and broken in each way that it must name."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from helpers.evidence import verdict_of
from helpers.losses import MOVES, STEPS, arm, decided, each, falling, signed
from pytest_fp8 import Verdict
from pytest_fp8.codes import C, D
from pytest_fp8.questions.loss.evidence import Course, Curve, Moved
from pytest_fp8.stats.loss import loss_fall

COURSE = Course(
    rates=[[1e-3]] * 5,
    stepped=[1] * 4,
    state={"up": "exp_avg bfloat16", "down": "exp_avg bfloat16"},
    alone={"teacher.up": True, "frozen": False},
)


def course(noisy=None, bf16=COURSE, **changes):
    """Arms of which FP8's trains otherwise; ``noisy``: BF16's course with noise."""
    more = {"noisy": each(arm(wobble=0.0), course=noisy)} if noisy else {}
    return decided(each(arm(0.001), course=replace(COURSE, **changes)), each(arm(wobble=0.0), course=bf16), **more)


def moves(*, reference=MOVES, **changes):
    return decided(arm(0.001, moves={**reference, **changes}), arm(wobble=0.0, moves=reference))


def slow(moved, **more):
    return moves(reference={**dict.fromkeys(MOVES, moved), **more})


def off(by, **kept):
    """FP8's losses, this far off after the first step."""
    return {s: replace(c, losses=[c.losses[0], *(x + by for x in c.losses[1:])], **kept) for s, c in arm(0.001).items()}


def at(seed, step, **values):
    """FP8's curves with another loss or norm in one step of a seed."""
    fp8 = arm(0.001)
    for field, value in values.items():
        numbers = [*getattr(fp8[seed], field)]
        fp8[seed] = replace(fp8[seed], **{field: [*numbers[:step], value, *numbers[step + 1 :]]})
    return fp8


def constant(value=2.28125, **more):
    still = {s: Curve(s, [value] * STEPS, [1.0 + s] * STEPS, **more) for s in range(3)}
    return decided(still, still)


def flat(offset=0.0, noise=0.05, slope=0.0):
    draws = np.random.default_rng(3).normal(0, noise, (3, 40))
    return {
        s: Curve(s, (2.3 + offset * (1 + s / 9) + draws[s] - slope * np.arange(40)).tolist(), [1.0 + offset] * 40)
        for s in range(3)
    }


FOUND = [
    (lambda: decided(at(1, 12, losses=math.nan)), Verdict.FAIL, C.NOT_FINITE, "loss = nan at step 12, seed 1"),
    (lambda: decided(at(0, 1, gradient_norms=math.inf)), Verdict.FAIL, C.NOT_FINITE, "gradient norm is not finite"),
    (lambda: decided(bf16=off(math.nan)), Verdict.INVALID, C.REFERENCE_NOT_FINITE, "loss is not finite from step 1"),
    (lambda: decided(arm(wobble=0.0)), Verdict.FAIL, C.BIT_EQUAL, "3 seeds"),
    (lambda: decided(off(0.2)), Verdict.FAIL, C.HIGHER, "nats +-"),
    (lambda: decided(off(-0.3)), Verdict.INCONCLUSIVE, C.LOWER, "below BF16"),
    (lambda: decided(arm(0.001, wobble=0.02)), Verdict.INCONCLUSIVE, C.MORE_SEEDS, "of 3 seeds"),
    (lambda: decided(each(arm(0.5), data=1)), Verdict.FAIL, D.OTHER_DATA, "00000001 (FP8)"),
    (lambda: constant(0.0), Verdict.INVALID, C.CONSTANT, "0 in all"),
    (lambda: constant(eps=2**-7), Verdict.INVALID, C.CONSTANT, "2.281 in all"),
    (lambda: moves(down=Moved(4096, 0.0, 0.0)), Verdict.FAIL, C.WEIGHTS_STAND_STILL, "where 0.0% had a gradient: down"),
    (lambda: moves(down=Moved(4096, 0.0, 1.0)), Verdict.FAIL, C.WEIGHTS_STAND_STILL, "98.0% of down"),
    (lambda: slow(Moved(10**6, 0.077, 1.0)), Verdict.NOT_EXERCISED, C.SMALL_STEPS, "7.7% after 20 steps"),
    (lambda: slow(Moved(10**6, 0.0, 1.0)), Verdict.NOT_EXERCISED, C.NOTHING_MOVES, "0.0%"),
    (lambda: slow(Moved(10**6, 0.0, 0.0)), Verdict.NOT_EXERCISED, C.NO_GRADIENT, "0.0%"),
    (lambda: decided(flat(0.0005), flat()), Verdict.NOT_EXERCISED, C.NOTHING_LEARNT, "by 0.0"),
    (
        lambda: decided(flat(0.0005, slope=-0.01), flat(slope=-0.01)),
        Verdict.NOT_EXERCISED,
        C.NOTHING_LEARNT,
        "rises by 0.3",
    ),
    (
        lambda: decided(signed(0.05), signed(), noisy=signed(0.1)),
        Verdict.NOT_EXERCISED,
        C.NOTHING_LEARNT,
        "falls",
    ),
    (lambda: course(stepped=[1, 0, 1, 1]), Verdict.INVALID, D.OTHER_STEPS, "in training step 1 1 in BF16"),
    (
        lambda: course(rates=[[1e-3], [1e-3], *[[2e-3]] * 3]),
        Verdict.INVALID,
        D.OTHER_RATES,
        "after 2 training steps 0.001 in BF16",
    ),
    (
        lambda: course(state={**COURSE.state, "up": "exp_avg bfloat16, master float32"}),
        Verdict.INVALID,
        D.OTHER_OPTIMIZER_STATE,
        "master float32",
    ),
    (lambda: course(left=["norm"]), Verdict.INVALID, D.GRADIENTS_LEFT, "left in FP8: norm"),
    (lambda: course(alone={**COURSE.alone, "teacher.up": False}), Verdict.FAIL, D.STANDS_STILL, "teacher.up"),
    (lambda: course(alone={**COURSE.alone, "frozen": True}), Verdict.FAIL, D.FROZEN_MOVES, "frozen"),
]


@pytest.mark.parametrize(("decision", "verdict", "code", "says"), FOUND, ids=[row[2].slug for row in FOUND])
def test_what_is_broken_is_named(decision, verdict, code, says):
    verdict_of(decision(), verdict, code, says)


def resting():
    """An expert that rests with one seed."""
    fp8 = arm(0.001)
    fp8[1] = replace(fp8[1], movement={**MOVES, "down": Moved(4096, 0.0, 0.0)})
    return decided(fp8)


def to_zero():
    reference = {s: Curve(s, [*(1.0 - 0.1 * t for t in range(10)), *[0.0] * 40], [1.0] * STEPS) for s in range(3)}
    return decided({s: Curve(s, [1.001, *c.losses[1:]], [1.1] * STEPS) for s, c in reference.items()}, reference)


def with_other_gradients():
    """A loss near 60 has one bfloat16 in each 0.25: equal losses with other norms are two precisions."""
    reference = each(arm(wobble=0.0), gradient_norms=[1.0] * 20)
    return decided(each(reference, gradient_norms=[1.1] * 20), reference)


SKIPS, OWN_RATES = {"stepped": [1, 0, 1, 1]}, {"rates": [[1e-3], *[[2e-3]] * 4]}
SOUND = {
    "healthy": decided,
    "an expert rests": resting,
    "few elements of a weight move": lambda: moves(norm=Moved(64, 0.9, 1.0)),
    "30 % of the weights move": lambda: slow(Moved(10**6, 0.30, 1.0)),
    "rows without a gradient": lambda: slow(Moved(4096, 0.99, 1.0), embed=Moved(10**6, 0.003, 0.003)),
    "slow and falling": lambda: decided(flat(0.0005, slope=0.01), flat(slope=0.01)),
    "both arms reach zero": to_zero,
    "equal losses": with_other_gradients,
    "one course": course,
    "a schedule that looks at the loss skips": lambda: course(noisy=replace(COURSE, **SKIPS), **SKIPS),
    "or sets rates": lambda: course(noisy=replace(COURSE, **OWN_RATES), **OWN_RATES),
    "a buffer of the FP8 layers moves": lambda: course(alone={**COURSE.alone, "up.scale": True}),
    "gradients are cleared at a step's start": lambda: course(bf16=replace(COURSE, left=["up", "expert"]), left=["up"]),
}


@pytest.mark.parametrize("name", SOUND)
def test_sound_arms_pass(name):
    verdict_of(SOUND[name](), Verdict.PASS)


def test_a_higher_loss_fails_although_few_weights_move():
    little = {"up": Moved(10**6, 0.05, 1.0), "head": Moved(10**4, 0.9, 1.0)}
    verdict_of(decided(off(0.2, movement=little), arm(wobble=0.0, moves=little)), Verdict.FAIL, C.HIGHER)


def test_a_loss_that_stays_up_since_weights_stand_still_is_told_by_these():
    verdict_of(decided(off(0.2, movement={**MOVES, "down": Moved(4096, 0.0, 1.0)})), Verdict.FAIL, "1 of 3 weights")


def test_a_loss_of_noise_is_taken_for_learning_as_rarely_as_it_says():
    rng = np.random.default_rng(1)
    seen = [loss_fall(2.3 + rng.normal(0, 0.05, (3, 40))).learns for _ in range(2000)]
    assert 0.01 < np.mean(seen) < 0.05


def test_the_figures_are_of_the_gap_and_of_the_reference():
    figures = decided().figures
    assert (figures.seeds, figures.steps) == (3, 20)
    assert figures.moved > 0.97
    assert decided(falling(2.0, 1.001, 0.001, 3.0), falling(2.0, start=3.0)).figures.margin == pytest.approx(0.02)
