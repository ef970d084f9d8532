"""The loss rule on whole curves, and what its margins are shares of. Pure.

The bounds of the margin were found on language models, whose losses are of 1 to 12 nats. Below 1 they are taken as
shares of the loss: 0.02 says nothing of a squared error that ends at 0.0003. From 1 on they are what they were.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pytest_fp8.rules.decide import LossGap, decide_loss, loss_margin, loss_noise, tail, tail_gap

ROUNDED_AWAY = 2.0**-16
"""Share of the largest loss below which the end of a curve is rounding: what remains of a squared error where the
output is rounded to bfloat16, whose eight bits leave 2**-8 of it."""


@dataclass(frozen=True)
class LossScale:
    """What a margin is a share of."""

    value: float
    """1, or the reference's loss at the end where that is below 1: mean over its last fifth and over seeds, absolute.
    In the loss's own unit."""
    why_none: str = ""
    """Why a share of that end says nothing, so that no gap can be called too large; empty where it does."""

    @property
    def relative(self) -> bool:
        return self.value < 1


def loss_scale(bf16: Sequence[Sequence[float]]) -> LossScale:
    """The scale of the reference's curves, one per seed."""
    tails = [tail(losses) for losses in bf16]
    means = [sum(end) / len(end) for end in tails]
    # min() keeps its first argument beside a NaN: curves that are not finite are judged elsewhere.
    value = min(1.0, abs(sum(means) / len(means)))
    why = ""
    if value < 1:
        every = [x for end in tails for x in end]
        largest = max(abs(x) for losses in bf16 for x in losses)
        if min(every) < 0 < max(every):
            why = "changes sign"
        elif value <= ROUNDED_AWAY * largest:
            why = "is rounded away"
    return LossScale(value, why)


def compare_curves(
    fp8: Sequence[Sequence[float]], bf16: Sequence[Sequence[float]], bf16_gaps: Sequence[float]
) -> LossGap:
    """Decide on the losses of both arms, a curve per seed, with :func:`~pytest_fp8.rules.decide.decide_loss`.

    ``bf16_gaps``: tail gaps of BF16 against BF16. The rule does not depend on the unit: gaps and margin divided by the
    scale decide alike. Where the scale is below 1 a FAIL needs a gap beyond BF16's own noise too, for a loss near zero
    can have a margin far below it; and where the scale says nothing, there is no FAIL.
    """
    gaps = [tail_gap(mine, reference) for mine, reference in zip(fp8, bf16, strict=True)]
    scale = loss_scale(bf16)
    noise = 0.0
    if scale.relative:
        noise = math.inf if scale.why_none else loss_noise(bf16_gaps)
    return decide_loss(gaps, loss_margin(bf16_gaps, scale.value), noise)
