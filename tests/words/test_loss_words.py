"""Every sentence of the loss question, from evidence written by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from helpers.falling import STEPS, falling, signed
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
    arms = (arm(0.001), replace(COURSE, **changes)), (arm(wobble=0.0), COURSE), (arm(), COURSE)
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


def rates(rate):
    return each(arm(), course=Course(rates=[[rate], [1e-4]]))


def first(factor, **evidence):
    reference = falling(2.0, start=4.0, seeds=3)
    fp8 = {
        s: replace(c, losses=[factor * c.losses[0], *c.losses[1:]], gradient_norms=[1.1] * STEPS)
        for s, c in reference.items()
    }
    return check_loss(LossEvidence(fp8, reference, reference, **evidence))


def constant(**more):
    still = {s: Curve(s, [2.28125] * STEPS, [1.0 + s] * STEPS, **more) for s in range(3)}
    return judged(still, still)


def flat(offset=0.0):
    steps = range(STEPS)
    return {
        s: Curve(s, [2.3 + offset + 0.05 * math.cos(2.2 * t + s) for t in steps], [1.0 + offset] * STEPS)
        for s in range(3)
    }


def wandering(end, **more):
    up, down = falling(end, 1.1, **more), falling(end, 0.9, **more)
    return {s: (down if s % 2 else up)[s] for s in up}


def rounded():
    reference = falling(0.04, start=0.05)
    fp8 = {
        s: replace(c, losses=[x * 1.08 for x in c.losses], gradient_norms=[1.1] * STEPS) for s, c in reference.items()
    }
    twin = falling(0.04, start=0.05, wobble=0.001)
    given = {s: [1.1 * c.losses[0]] for s, c in reference.items()}
    return check_loss(LossEvidence(fp8, reference, twin, moved_first=given, moved_last={0: [0.002] * 4}))


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
    (C.NOT_ANEW, "data", decided(twin=each(arm(), data=7))),
    (
        C.NOT_ANEW,
        "rates",
        decided(bf16=rates(1e-3), twin=rates(1e-4), fp8=each(arm(0.001), course=Course(rates=[[1e-3], [1e-4]]))),
    ),
    (C.NOT_ANEW, "losses", decided(twin=off(-0.2))),
    (C.MOVE_LESS, "", decided(moves(down=Moved(4096, 0.3, 0.3)))),
    (C.HIGHER, "in nats", decided(off(0.2))),
    (C.HIGHER, "below 1", judged(falling(0.001, wobble=0.001), falling(0.0003))),
    (C.HIGHER, "a sum", judged(falling(2000, 1.01, wobble=1e-4, start=2600), falling(2000, start=2600))),
    (C.LOWER, "", decided(off(-0.3))),
    (C.MORE_SEEDS, "scatter", judged(falling(2.0, 1.01, wobble=0.01, start=3.0), falling(2.0, start=3.0))),
    (C.MORE_SEEDS, "at the margin", judged(falling(2.0, 1.01, wobble=0.0005, start=3.0), falling(2.0, start=3.0))),
    (C.TOO_NOISY, "", judged(falling(0.01, 1.2, wobble=0.0001), falling(0.01), wandering(0.01))),
    (C.CHANGES_SIGN, "", judged(signed(0.05), signed())),
    (C.ROUNDED_AWAY, "", judged(falling(3e-7, 2.0, wobble=0.001), falling(1e-7))),
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
    (C.FIRST_STEP, "moved weights", first(1.3, moved_first={s: [4.2, 3.8] for s in range(3)})),
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
    (None, "a sum", judged(falling(2000, 1.0003, wobble=1e-4, start=2600), falling(2000, start=2600))),
    (None, "room for rounding", rounded()),
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
    assert set(C) <= {code for code, *_ in FOUND}
