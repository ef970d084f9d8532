"""Losses that fall by hand, and others of both signs: what the loss question decides of two arms' curves."""

import numpy as np

from pytest_fp8.questions.loss.check import check_loss
from pytest_fp8.questions.loss.evidence import Curve, LossEvidence

STEPS = 50


def falling(end, factor=1.0, wobble=0.0, start=1.0, seeds=4):
    """Curves from ``start`` to ``end``; ``factor`` and ``wobble`` (a share of the end, another for each seed) act on
    what comes after the first step."""
    path = np.geomspace(start, end, STEPS)
    return {
        s: Curve(s, [start, *(path[1:] * (factor + wobble * (s - 1.4)))], [1.0 + s + factor] * STEPS)
        for s in range(seeds)
    }


def decided(fp8, bf16, **more):
    return check_loss(LossEvidence(fp8, bf16, **more))


def signed(offset=0.0, noise=0.3, seeds=4):
    """Curves about zero, as a policy gradient's or a critic's are."""
    return {
        s: Curve(
            s, [0.004 if not t else noise * np.cos(2.2 * t + s) + offset for t in range(STEPS)], [1.0 + offset] * STEPS
        )
        for s in range(seeds)
    }
