"""Does the reference begin each curve anew? Its curves against its own from weights one rounding away. Pure.

A model that is trained twice from the same start ends about where it ended before, now above and now below. One that
keeps something of the curve before ends on one side of it, every time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pytest_fp8.rules.loss import LOSS_MARGIN, MAX_LOSS_SEEDS, LossScale
from pytest_fp8.rules.statistics import student_quantile

RESTART_ALPHA = 0.01
"""Chance of saying that an arm does not begin anew where its two runs differ by chance alone, on either side and over
all numbers of seeds that are looked at. Of 4000 simulated cases each, with 0.05 to 1 nats of scatter, it was said of at
most 0.7 %; with this chance at each look of 4 %."""


@dataclass(frozen=True)
class Restart:
    """The second runs' loss less the first runs', at the end of the curves, in the loss's own unit."""

    gap: float
    """Mean over seeds."""
    bound: float
    """Half-width of the interval that chance alone leaves with :data:`RESTART_ALPHA`; infinite for one gap alone."""
    floor: float
    """Up to which a gap is nothing to speak of."""

    @property
    def anew(self) -> bool:
        return not abs(self.gap) > max(self.bound, self.floor)

    @property
    def doubtful(self) -> bool:
        """Whether the gap is one to speak of that chance alone may have made: more seeds tell."""
        return self.anew and abs(self.gap) > self.floor


def decide_restart(
    twin_gaps: Sequence[float], fp8_gaps: Sequence[float], scale: LossScale, one_start: bool = False
) -> Restart:
    """Judge the tail gaps of BF16 against itself, one for each seed.

    Few gaps can lie close together by chance, so how far runs of one start scatter is taken from the gaps of FP8
    against BF16 as well, each kind about its own mean. ``one_start``: all gaps are to one and the same run, whose own
    scatter they share. The floor is the widest margin of the loss question, and no share of a loss of which shares
    mean nothing.
    """
    count = len(twin_gaps)
    gap = sum(twin_gaps) / count if count else 0.0
    degrees = sum(max(0, len(gaps) - 1) for gaps in (twin_gaps, fp8_gaps))
    bound = math.inf
    if count and degrees:
        sigma = math.sqrt(sum(_squares(gaps) for gaps in (twin_gaps, fp8_gaps)) / degrees)
        alpha = RESTART_ALPHA / (MAX_LOSS_SEEDS - 2)
        bound = student_quantile(1 - alpha / 2, degrees) * sigma * math.sqrt(1 / count + one_start)
    floor = math.inf if scale.why_none else max(LOSS_MARGIN[1] * scale.value, scale.spacing)
    return Restart(gap, bound, floor)


def _squares(gaps: Sequence[float]) -> float:
    """Sum of squares about their mean."""
    mean = sum(gaps) / len(gaps) if gaps else 0.0
    return sum((gap - mean) ** 2 for gap in gaps)
