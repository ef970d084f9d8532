"""Loss curves of both arms, by hand, and what the loss question decides of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from helpers.evidence import curves
from pytest_fp8.questions.loss.check import check_loss
from pytest_fp8.questions.loss.evidence import Curve, LossEvidence, Moved, ProductCount

STEPS = 50
MOVES = {"up": Moved(4096, 0.99, 1.0), "down": Moved(4096, 0.98, 1.0), "norm": Moved(64, 0.0, 1.0)}
STEP = {"forward": ProductCount(14, 1), "backward": ProductCount(28, 2)}


def arm(offset=0.0, moves=MOVES, first=STEP, last=STEP, **more):
    """An arm that learns, with weights that move and the products of its first and last step."""
    return {
        s: replace(c, movement=moves, first_products={} if s else first, last_products=last)
        for s, c in curves(offset, **more).items()
    }


def decided(fp8=None, bf16=None, **changes):
    return check_loss(LossEvidence(fp8 or arm(0.001), bf16 or arm(wobble=0.0), **changes))


def each(curves, **changes):
    return {seed: replace(curve, **changes) for seed, curve in curves.items()}


def falling(end, factor=1.0, wobble=0.0, start=1.0, seeds=4):
    """Curves from ``start`` to ``end``; ``factor`` and ``wobble`` (a share of the end, another for each seed) act on
    what comes after the first step."""
    path = np.geomspace(start, end, STEPS)
    return {
        s: Curve(s, [start, *(path[1:] * (factor + wobble * (s - 1.4)))], [1.0 + s + factor] * STEPS)
        for s in range(seeds)
    }


def signed(offset=0.0, noise=0.3, seeds=4):
    """Curves about zero, as a policy gradient's or a critic's are."""
    return {
        s: Curve(
            s, [0.004 if not t else noise * np.cos(2.2 * t + s) + offset for t in range(STEPS)], [1.0 + offset] * STEPS
        )
        for s in range(seeds)
    }
