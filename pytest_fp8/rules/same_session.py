"""The rule of the comparison in one session: base against head on one machine, no stored baseline. Pure; no numpy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pytest_fp8.rules.speed import speed_of
from pytest_fp8.rules.statistics import normal_quantile
from pytest_fp8.verdicts import Verdict

PAIRS = (2, 4, 6)
"""Fresh pairs of processes at each look. Never one: a single process may be slow by chance."""
BLOCKS = 6
"""ABBA blocks per pair: with these the noise between blocks is below the spread between processes."""
ALPHA = 0.01
"""Chance of calling an unchanged head slower, over all looks."""


@dataclass(frozen=True)
class SideSpeed:
    """Head's speed over base's as a log ratio, ``theta`` +- ``half_width``. Below zero head is slower."""

    theta: float
    error: float
    half_width: float
    pairs: int
    verdict: Verdict

    @property
    def change(self) -> float:
        """Of the speed, as a fraction: -0.03 where the head takes 3 % longer."""
        return math.expm1(self.theta)

    @property
    def interval(self) -> tuple[float, float]:
        return math.expm1(self.theta - self.half_width), math.expm1(self.theta + self.half_width)


def decide_same_session(pairs: Sequence[Sequence[float]], tolerance: float, looks: int = len(PAIRS)) -> SideSpeed:
    """``pairs``: per fresh pair of processes, one log ratio per ABBA block, ln(base time / head time).

    FAIL where the head lost more than ``tolerance`` (a fraction of speed), PASS where it did not, each with confidence
    ``1 - ALPHA / looks``; else INCONCLUSIVE, which asks for another look. The standard error is that of
    :func:`~pytest_fp8.rules.speed.speed_of`. Raises ``ValueError`` for a tolerance that is no fraction.
    """
    if not 0 < tolerance < 1:
        raise ValueError(f"a tolerance is a fraction between 0 and 1, not {tolerance}")
    speed = speed_of(pairs)
    half = quantile(looks) * speed.error
    bound = math.log(1 - tolerance)
    if speed.theta + half < bound:
        verdict = Verdict.FAIL
    elif speed.theta - half > bound:
        verdict = Verdict.PASS
    else:
        verdict = Verdict.INCONCLUSIVE
    return SideSpeed(speed.theta, speed.error, half, speed.processes, verdict)


def own_change(fp8: SideSpeed, bf16: SideSpeed, looks: int = len(PAIRS)) -> tuple[float, float]:
    """(change, half-width), as log ratios: FP8's change from base to head less BF16's. Where it is within the
    half-width, the change is common to both precisions."""
    return fp8.theta - bf16.theta, quantile(looks) * math.hypot(fp8.error, bf16.error)


def quantile(looks: int) -> float:
    """One-sided standard normal quantile, with ``ALPHA`` shared by the looks."""
    return normal_quantile(1 - ALPHA / looks)
