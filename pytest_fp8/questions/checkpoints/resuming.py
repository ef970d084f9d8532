"""Whether training goes on where the source of a checkpoint was. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pytest_fp8.codes import K
from pytest_fp8.questions.checkpoints.evidence import Apart, Transfer
from pytest_fp8.questions.checkpoints.words import WITH_SCALES, WORDS
from pytest_fp8.questions.findings import tell
from pytest_fp8.rules.loss import LOSS_MARGIN
from pytest_fp8.verdicts import Finding, Verdict

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
    least = OF_A_SUM * largest if largest > MOST_NATS else LOSS_MARGIN[1] * min(1.0, largest)
    apart = max(abs(each) for each in (start.losses, *start.moved_losses))
    return max(least, min(2 * apart, MOST * largest))


def check_resumed(t: Transfer) -> Finding | None:
    """``None`` where training goes on; asked of transfers that carry the optimizer."""
    if not t.with_optimizer:
        return None
    source, resumed = t.source.losses, t.resumed.losses
    gap = sum(resumed) / len(resumed) - sum(source) / len(source)
    limit = resume_limit(source, t.start)
    goes_on = abs(gap) <= limit and math.isfinite(gap)
    # What a model computes for its own input differs with the precision, so inputs count only where losses differ. How
    # often one batch enters may depend on the losses: LBFGS ends its iterations early.
    if t.source.data != t.resumed.data or (not goes_on and {*t.source.inputs} != {*t.resumed.inputs}):
        return other_data(
            f"other batches for the same steps; losses {_losses(resumed)} after {_losses(source)} of the source"
        )
    if goes_on:
        return None
    if not all(map(math.isfinite, source)):
        expected = "finite losses of the arm that saved, to compare those of the arm that loaded with"
        seen = f"{_losses(source)} of the source, {_losses(resumed)} resumed"
        return tell(WORDS, K.SOURCE_DIVERGED, expected, seen, Verdict.INVALID, arm=t.arms[0].upper())
    expected = f"the source's losses {_losses(source)} within {limit:.3g} on average"
    words = WITH_SCALES if t.keeps_scales else WORDS
    return tell(words, K.DOES_NOT_GO_ON, expected, f"{_losses(resumed)} ({gap:+.3g})")


def other_data(seen: str) -> Finding:
    """The comparison is none: the target was given other data than the source."""
    expected = "the batches that the source trained on after saving"
    return tell(WORDS, K.DATA_NOT_CARRIED, expected, seen, Verdict.INVALID)


def _losses(values: Sequence[float]) -> str:
    return "[" + ", ".join(f"{value:.4g}" for value in values) + "]"
