"""Whether training goes on where the source of a checkpoint was. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pytest_fp8.questions.checkpoints.evidence import Apart, Transfer

LEAST_NATS = 0.05
"""In nats per token; of a loss below 1 that share of it."""
MOST_NATS = 14.0
"""No loss in nats per token is larger: guessing among a million tokens costs that. A larger one is a sum over the
batch, or has a unit of its own."""
OF_A_SUM = 0.01
"""Share of such a loss by which the means may differ: docs/limits.md, as of each number here."""
MOST = 0.25
"""The largest limit, as a share of the largest loss: FP8 that differs by more is the loss question's matter."""


def resume_limit(losses: Sequence[float], start: Apart) -> float:
    """How far the mean of the resumed losses may lie from the source's.

    0.05, as nats per token; below a loss of 1 that share of the largest, which no change of sign brings to zero; above
    :data:`MOST_NATS` a share of it, too. Where the precisions themselves differ by more on average over the first steps
    from the same weights, or moved weights make the reference's own loss differ by more, twice that and at most
    :data:`MOST` of the largest: a loss that is a small difference of large numbers shows FP8's rounding in full.
    """
    largest = max((abs(loss) for loss in losses), default=math.nan)
    least = OF_A_SUM * largest if largest > MOST_NATS else LEAST_NATS * min(1.0, largest)
    apart = max(abs(each) for each in (start.losses, *start.moved_losses))
    return max(least, min(2 * apart, MOST * largest))


def astray(t: Transfer) -> bool:
    """Whether training does not go on where the source was; asked of transfers that carry the optimizer."""
    if not t.with_optimizer:
        return False
    source, resumed = t.source.losses, t.resumed.losses
    gap = sum(resumed) / len(resumed) - sum(source) / len(source)
    return not (abs(gap) <= resume_limit(source, t.start) and math.isfinite(gap))


def other_data(t: Transfer) -> str:
    """What is seen where the target was given other data than the source, so that the comparison is none.

    What a model computes for its own input differs with the precision, so inputs count only where losses differ. How
    often one batch enters may depend on the losses: LBFGS ends its iterations early.
    """
    others = t.source.data != t.resumed.data or (astray(t) and {*t.source.inputs} != {*t.resumed.inputs})
    seen = f"losses {losses(t.resumed.losses)} after {losses(t.source.losses)} of the source"
    return f"other batches for the same steps; {seen}" if t.with_optimizer and others else ""


def losses(values: Sequence[float]) -> str:
    return "[" + ", ".join(f"{value:.4g}" for value in values) + "]"
