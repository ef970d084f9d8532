"""Arms that learn alike, by hand: their curves, weights that move, products in the first and last step."""

from __future__ import annotations

from dataclasses import replace

from helpers.evidence import curves
from pytest_fp8.questions.loss.check import check_loss
from pytest_fp8.questions.loss.evidence import LossEvidence, Moved, ProductCount

MOVES = {"up": Moved(4096, 0.99, 1.0), "down": Moved(4096, 0.98, 1.0), "norm": Moved(64, 0.0, 1.0)}
STEP = {"forward": ProductCount(14, 1), "backward": ProductCount(28, 2)}


def arm(offset=0.0, moves=MOVES, first=STEP, last=STEP, **more):
    return {
        s: replace(c, movement=moves, first_products={} if s else first, last_products=last)
        for s, c in curves(offset, **more).items()
    }


def decided(fp8=None, bf16=None, **changes):
    return check_loss(LossEvidence(fp8 or arm(0.001), bf16 or arm(wobble=0.0), **changes))
