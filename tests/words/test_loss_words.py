"""Every sentence of the loss question, from evidence written by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from helpers.falling import STEPS, falling
from helpers.falling import decided as judged
from helpers.learning import MOVES, arm, decided
from pytest_fp8.codes import C, D
from pytest_fp8.questions.loss.check import check_loss
from pytest_fp8.questions.loss.evidence import Course, Curve, LayerCalls, Look, LossEvidence, Moved, ProductCount

COURSE = Course(
    rates=[[1e-3]] * 5,
    stepped=[1] * 4,
    state={"up": "exp_avg bfloat16", "down": "exp_avg bfloat16"},
    alone={"teacher.up": True, "frozen": False},
)


def course(**changes):
    """Arms of which FP8's trains otherwise."""
    arms = (arm(0.001), replace(COURSE, **changes)), (arm(wobble=0.0), COURSE)
    return check_loss(LossEvidence(*({s: replace(c, course=own) for s, c in each.items()} for each, own in arms)))


def each(fp8, **changes):
    return {seed: replace(curve, **changes) for seed, curve in fp8.items()}


def moves(**changes):
    return arm(0.001, moves={**MOVES, **changes})


def slow(moved):
    still = dict.fromkeys(MOVES, moved)
    return decided(arm(0.001, moves=still), arm(wobble=0.0, moves=still))


def off(by, **kept):
    return {
        s: replace(c, losses=[x + by * (t > 0) for t, x in enumerate(c.losses)], **kept) for s, c in arm(0.001).items()
    }


def looked(*looks):
    calls = LayerCalls([1] * 20, [0] * 20, {"up": [Look(step, *values) for step, values in enumerate(looks)]})
    return decided(each(arm(0.001), calls=calls))


def again(noise=0.0, **changes):
    """A reference whose first steps were trained again with these changes."""
    first = arm(wobble=0.0)[0]
    starts = [replace(first, losses=[x + side * noise for x in first.losses[:4]]) for side in (-1, 1)]
    return decided(again=replace(first, **changes), noisy_starts={0: starts})


def again_at(*rates):
    first, again = (Course(rates=[[rate]]) for rate in rates)
    return decided(
        bf16=each(arm(wobble=0.0), course=first),
        fp8=each(arm(0.001), course=first),
        again=replace(arm(wobble=0.0)[0], course=again),
    )


def first(factor, noise=0.0, **evidence):
    reference = falling(2.0, start=4.0, seeds=3)
    fp8 = {
        s: replace(c, losses=[factor * c.losses[0], *c.losses[1:]], gradient_norms=[1.1] * STEPS)
        for s, c in reference.items()
    }
    starts = {s: [replace(c, losses=[(1 + noise) * c.losses[0]])] for s, c in reference.items()}
    return judged(fp8, reference, noisy_starts=starts, **evidence)


def constant(**more):
    still = {s: Curve(s, [2.28125] * STEPS, [1.0 + s] * STEPS, **more) for s in range(3)}
    return judged(still, still)


def flat(offset=0.0):
    steps = range(STEPS)
    return {
        s: Curve(s, [2.3 + offset + 0.05 * math.cos(2.2 * t + s) for t in steps], [1.0 + offset] * STEPS)
        for s in range(3)
    }


def noisy(factor, by):
    """FP8 that ends so many times as high; noise takes BF16's end up and down by this share."""
    reference = falling(0.04)
    aside = {s: replace(c, losses=[x * (1 + by * (-1) ** s) for x in c.losses]) for s, c in reference.items()}
    return judged(falling(0.04, factor, wobble=0.001), reference, noisy=aside)


def in_bfloat16():
    reference = each(falling(46, start=60), eps=2.0**-7)
    fp8 = {
        s: replace(c, losses=[*c.losses[:-5], *(x + 0.125 for x in c.losses[-5:])], gradient_norms=[2.0] * STEPS)
        for s, c in reference.items()
    }
    return judged(fp8, reference)


LAST = {"forward": ProductCount(0, 15), "backward": ProductCount(0, 30)}
PART = {"forward": ProductCount(13, 2), "backward": ProductCount(28, 2)}
RISING = {s: Curve(s, [0.5 + t * (s + 1) for t in range(STEPS)], [1.0] * STEPS) for s in range(3)}
FOUND = [
    (C.FP8_LOST, "at the end", decided(arm(0.001, last=LAST))),
    (C.FP8_LOST, "less at the end", decided(arm(0.001, last=PART))),
    (
        C.FP8_LOST,
        "in one step",
        decided(each(arm(0.001), calls=LayerCalls([14] * 3 + [0] + [14] * 16, [0] * 3 + [14] + [0] * 16))),
    ),
    (C.TOO_EXACT, "", looked((0.001, 0.97, 1.0), (0.001, 0.003, 1.0))),
    (C.WEIGHTS_STAND_STILL, "no gradient", decided(moves(down=Moved(4096, 0.0, 0.0)))),
    (C.WEIGHTS_STAND_STILL, "not stepped", decided(moves(down=Moved(4096, 0.0, 1.0)))),
    (C.NOT_ANEW, "data", again(data_at_start=7)),
    (C.NOT_ANEW, "rates", again_at(1e-3, 1e-4)),
    (C.NOT_ANEW, "losses", again(0.01, losses=[5.0, 4.8, 4.7, 4.5])),
    (C.MOVE_LESS, "", decided(moves(down=Moved(4096, 0.3, 0.3)))),
    (C.HIGHER, "in nats", decided(off(0.2))),
    (C.HIGHER, "below 1", judged(falling(0.001, wobble=0.001), falling(0.0003))),
    (C.HIGHER, "a sum", judged(falling(2000, 1.03, 1e-4, start=2600), falling(2000, start=2600), nats=False)),
    (C.HIGHER, "noise", noisy(1.3, 0.06)),
    (C.LOWER, "", decided(off(-0.3))),
    (C.MORE_SEEDS, "scatter", judged(falling(2.0, 1.01, wobble=0.01, start=3.0), falling(2.0, start=3.0))),
    (C.MORE_SEEDS, "at the margin", judged(falling(2.0, 1.01, wobble=0.0005, start=3.0), falling(2.0, start=3.0))),
    (C.TOO_NOISY, "", noisy(7.0, 8.0)),
    (
        C.REFERENCE_RISES,
        "",
        judged({s: replace(c, losses=[x * (1 + 0.01 * s) for x in c.losses]) for s, c in RISING.items()}, RISING),
    ),
    (
        C.NOT_FINITE,
        "loss",
        decided({**arm(0.001), 1: replace(arm(0.001)[1], losses=[*arm(0.001)[1].losses[:-1], math.nan])}),
    ),
    (C.NOT_FINITE, "norm", decided({**arm(0.001), 0: replace(arm(0.001)[0], gradient_norms=[math.inf] * 20)})),
    (C.REFERENCE_NOT_FINITE, "", decided(bf16=each(arm(wobble=0.0), losses=[math.nan] * 20))),
    (C.CONSTANT, "", constant()),
    (C.CONSTANT_IN_16_BITS, "", constant(eps=2**-7)),
    (C.BIT_EQUAL, "", decided(arm(wobble=0.0))),
    (C.FIRST_STEP, "in nats", first(1.3)),
    (C.FIRST_STEP, "moved weights", first(1.3, 0.06)),
    (C.FIRST_STEP, "no cross-entropy", first(1.3, nats=False)),
    (C.RARE_PRODUCT, "", looked(*[(0.001, 0.97, 1.0)] * 6, (0.4, 0.97, 100.0))),
    (C.SMALL_STEPS, "", slow(Moved(10**6, 0.077, 1.0))),
    (C.NOTHING_MOVES, "", slow(Moved(10**6, 0.0, 1.0))),
    (C.NO_GRADIENT, "", slow(Moved(10**6, 0.0, 0.0))),
    (C.NOTHING_LEARNT, "", judged(flat(0.0005), flat())),
    (D.OTHER_DATA, "", decided(each(arm(0.001), data=1))),
    (D.OTHER_STEPS, "", course(stepped=[1, 0, 1, 1])),
    (D.OTHER_RATES, "", course(rates=[[1e-3], [1e-3], *[[2e-3]] * 3])),
    (D.OTHER_OPTIMIZER_STATE, "", course(state={**COURSE.state, "up": "exp_avg bfloat16, master float32"})),
    (D.GRADIENTS_LEFT, "", course(left=["norm"])),
    (D.STANDS_STILL, "", course(alone={**COURSE.alone, "teacher.up": False})),
    (D.FROZEN_MOVES, "", course(alone={**COURSE.alone, "frozen": True})),
    (None, "in nats", decided()),
    (None, "below 1", judged(falling(0.0003, 1.002, wobble=0.001), falling(0.0003))),
    (None, "a sum", judged(falling(2000, 1.0003, 1e-4, start=2600), falling(2000, start=2600), nats=False)),
    (None, "noise", noisy(1.1, 0.06)),
    (None, "no finer type", in_bfloat16()),
]
"""Code, what is special, and the decision."""


@pytest.mark.parametrize(
    ("code", "_", "decision"),
    FOUND,
    ids=[" ".join(filter(None, (code.slug if code else "PASS", what))) for code, what, _ in FOUND],
)
def test_words(code, _, decision, snapshot):
    assert decision.code is code, decision.message
    assert decision.message == snapshot


def test_every_code_has_its_words_here():
    assert set(C) - {"FP8-C10", "FP8-C11"} <= {code for code, *_ in FOUND}, "retired"
