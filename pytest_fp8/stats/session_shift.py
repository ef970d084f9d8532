"""How far all gated cases of a session moved together, and which of them moved by themselves. Pure; no numpy.

One median over cases, not a fit: a few cases that really lost speed do not move it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from pytest_fp8.stats.quantiles import median_variance, normal_quantile, robust_sigma, student_quantile

FEWEST = 4
"""Cases from which a common shift is told: the median of three is one case's."""
ALPHA = 0.01
"""Chance, at most, to call an unmoved session moved, and to call any of its cases moved by itself. By simulation 0.2 to
0.5 % of either (``tests/test_session_shift.py``)."""
NAMED = 4
"""Cases that a line names."""


@dataclass(frozen=True)
class Shift:
    """Changes of log ratios. ``common`` +- ``half_width`` (99 %): how far the middle case moved."""

    common: float
    half_width: float
    cases: int
    expected: float
    """How far 99 of 100 sessions of unchanged cases move, at most."""
    own: Mapping[str, float] = field(default_factory=dict)
    """Cases that moved by themselves -> how far beyond ``common``."""

    @property
    def moved(self) -> bool:
        """Whether the shift is one at all."""
        return abs(self.common) > self.half_width

    @property
    def unusual(self) -> bool:
        """Whether it is more than sessions of unchanged cases differ by."""
        return self.moved and abs(self.common) > self.expected


@dataclass(frozen=True)
class Moved:
    """One case: the change of its log ratio against its history, and its standard error."""

    change: float
    error: float
    own_error: float
    """Of ``error``, what comes of the case's own processes and not of sessions."""


def session_shift(changes: Mapping[str, Moved]) -> Shift | None:
    """``changes``: case -> how far it moved. ``None`` for too few cases.

    The changes' own spread says how uncertain their median is, and never less than their errors let one expect.
    """
    if len(changes) < FEWEST:
        return None
    count, common = len(changes), median(moved.change for moved in changes.values())
    spread = robust_sigma([moved.change for moved in changes.values()])
    known = median(moved.own_error for moved in changes.values())
    sessions = median(math.sqrt(max(0.0, moved.error**2 - moved.own_error**2)) for moved in changes.values())

    def limit(chance: float, error: float) -> float:
        """The spread of a few cases is itself uncertain, and a change's own error hardly."""
        return max(student_quantile(1 - chance / 2, count - 1) * spread, normal_quantile(1 - chance / 2) * error)

    half = limit(ALPHA, known) * math.sqrt(median_variance(count))
    own = {
        case: moved.change - common
        for case, moved in changes.items()
        if abs(moved.change - common) > limit(ALPHA / count, max(moved.own_error, known))
    }
    return Shift(common, half, count, normal_quantile(1 - ALPHA / 2) * sessions, own)


def words(shift: Shift, failed: Mapping[str, float]) -> list[str]:
    """Lines for the closing summary; none for a session as sessions are. ``failed``: the case -> its change, of those
    that failed against their baselines."""
    said = []
    size = f"{math.expm1(shift.common):+.1%} +-{shift.half_width:.1%}"
    if shift.unusual:
        said += [
            f"all {shift.cases} gated cases moved by {size} alike: the host, its driver or a library, not one case",
            "  next: compare driver and libraries with the baselines' (pytest-fp8 baselines list CASE); run again on "
            "another host; if it stays, find it with pytest-fp8 compare, which a host's shift does not touch",
        ]
    alike = {case: change for case, change in failed.items() if case not in shift.own}
    if alike and shift.moved:
        said.append(
            f"{_named(alike)} failed and moved like the rest ({size}): less that, it changed by no more than noise"
        )
    alone = {case: shift.own[case] for case in failed if case in shift.own}
    if alone:
        said.append(f"{_named(alone)} beyond what all {shift.cases} gated cases moved by ({size}): its own change")
    others = {case: change for case, change in shift.own.items() if case not in failed}
    if others:
        said.append(f"not failed, and moved by itself: {_named(others)} beyond the session's {size}")
    return said


def _named(cases: Mapping[str, float]) -> str:
    shown = [f"{case} {math.expm1(change):+.1%}" for case, change in cases.items()]
    return ", ".join(shown[:NAMED]) + (f" and {len(shown) - NAMED} more" if len(shown) > NAMED else "")
