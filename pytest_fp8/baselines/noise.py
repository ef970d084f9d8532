"""The noise of one session's speedup, and where the level of a history changed by more than it. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from pytest_fp8.rules.change import elsewhere
from pytest_fp8.rules.statistics import normal_quantile
from pytest_fp8.rules.variance import MEASURED, Components, Session

ALPHA = 0.01
"""Chance that a history without a change is given a change point."""


def change_points(history: Sequence[Session], components: Components = MEASURED) -> list[tuple[int, float]]:
    """Where the level of a history of speedups changed: (index of the first session of the new level, change of the log
    ratio). ``history``: for each session its processes' log ratios, the oldest first. ``components``: the noise.

    Binary segmentation with known noise: the split whose two sides differ most, in standard errors, is a change point
    where it is beyond the quantile of ``ALPHA``, shared by all splits. Then each side is searched.
    """
    measured = [elsewhere(session, components) for session in history]
    levels = [one.theta for one in measured]
    weights = [one.error**-2 for one in measured]
    needed = normal_quantile(1 - ALPHA / 2 / max(1, len(history) - 1))

    def mean(start: int, end: int) -> tuple[float, float]:
        """(weighted mean of the levels, its weight)"""
        total = sum(weights[start:end])
        return sum(w * x for w, x in zip(weights[start:end], levels[start:end], strict=True)) / total, total

    def search(start: int, end: int) -> list[int]:
        best, where = needed, 0
        for split in range(start + 1, end):
            (before, first), (after, second) = mean(start, split), mean(split, end)
            score = abs(after - before) / math.sqrt(1 / first + 1 / second)
            if score > best:
                best, where = score, split
        return [*search(start, where), where, *search(where, end)] if where else []

    splits = search(0, len(history))
    bounds = pairwise([0, *splits, len(history)])
    means = [mean(start, end)[0] for start, end in bounds] if splits else []
    return [(where, after - before) for where, (before, after) in zip(splits, pairwise(means), strict=True)]
