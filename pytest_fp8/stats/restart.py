"""Does the reference begin each curve anew? Its curves against its own from weights one rounding away. Pure.

A model that is trained twice from the same start ends about where it ended before. One that keeps something of the
curve before has been trained further: it ends lower, every time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pytest_fp8.stats.loss import LOSS_MARGIN, LossScale, of_a_look
from pytest_fp8.stats.quantiles import sample_sd, student_quantile

RESTART_ALPHA = 0.01
"""Chance of saying that an arm does not begin anew where its two runs differ by chance alone, over all looks."""


@dataclass(frozen=True)
class Restart:
    """The second runs' loss less the first runs', at the end of the curves, in the loss's own unit."""

    gap: float
    """Mean over seeds."""
    bound: float
    """How far below zero chance alone takes it, but for :data:`RESTART_ALPHA`; infinite for one gap alone."""
    floor: float
    """Down to which a gap is nothing to speak of."""

    @property
    def anew(self) -> bool:
        return not -self.gap > max(self.bound, self.floor)

    @property
    def doubtful(self) -> bool:
        """Whether the gap is one to speak of that chance alone may have made: more seeds tell."""
        return self.anew and -self.gap > self.floor


def decide_restart(gaps: Sequence[float], scale: LossScale, one_start: bool = False) -> Restart:
    """Judge the tail gaps of BF16 against itself, one for each seed. ``one_start``: all are to one and the same run,
    whose own scatter they share.

    A gap above zero is none: weights that were trained well, as loaded ones are, become worse by the rounding itself.
    The floor is the widest margin of the loss question, and no share of a loss of which shares mean nothing.
    """
    count = len(gaps)
    gap = sum(gaps) / count if count else 0.0
    bound = math.inf
    if count > 1:
        alpha = of_a_look(RESTART_ALPHA, count)
        bound = student_quantile(1 - alpha, count - 1) * sample_sd(gaps) * math.sqrt(1 / count + one_start)
    floor = math.inf if scale.why_none else max(LOSS_MARGIN[1] * scale.value, scale.spacing)
    return Restart(gap, bound, floor)
