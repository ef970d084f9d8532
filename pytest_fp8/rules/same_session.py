"""The rule of the comparison in one session: base against head on one machine, no stored baseline. Pure; no numpy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pytest_fp8.rules.change import Change, change_of, judge
from pytest_fp8.rules.variance import Process
from pytest_fp8.verdicts import Verdict

PAIRS = (2, 4, 6)
"""Fresh pairs of processes at each look. Never one: a single process may be slow by chance."""
BLOCKS = 10
"""ABBA blocks per pair. On H200s blocks differ by more (0.7 %) than processes do (0.1 %), so that a block buys more
than a pair, which must be built. By ``python -m benchmarks.gate``, of losses of 1 % among 30 cases 91 % fail with six
blocks and 95 % with ten. A case takes 101 s of a GPU then (91 s with six), one that is slower by 1 % 145 s (150 s)."""


@dataclass(frozen=True)
class SideSpeed:
    """Head's speed over base's, and what it proves. Below zero head is slower."""

    moved: Change
    verdict: Verdict

    @property
    def pairs(self) -> int:
        """Fresh pairs of processes."""
        return len(self.moved.each)

    @property
    def change(self) -> float:
        """Of the speed, as a fraction: -0.03 where the head takes 3 % longer."""
        return math.expm1(self.moved.theta)

    @property
    def interval(self) -> tuple[float, float]:
        """Of :attr:`change`, 99 %."""
        theta, half = self.moved.theta, self.moved.half_width()
        return math.expm1(theta - half), math.expm1(theta + half)


def decide_same_session(
    pairs: Sequence[Process], tolerance: float, looks: int = len(PAIRS), cases: int = 1
) -> SideSpeed:
    """``pairs``: per fresh pair of processes, one log ratio per ABBA block, ln(base time / head time).

    The gate's rule without a history: what sessions differ by cancels. PASS where a loss of ``tolerance``, a fraction
    of speed, is excluded; FAIL where it is not and a loss is proven; IMPROVED where a gain is proven. Else
    INCONCLUSIVE, which asks for another look. ``cases`` share the false alarms. Raises ``ValueError`` for a tolerance
    that is no fraction.
    """
    if not 0 < tolerance < 1:
        raise ValueError(f"a tolerance is a fraction between 0 and 1, not {tolerance}")
    change = change_of(pairs, ())
    return SideSpeed(change, judge(change, tolerance, cases, looks, last=len(pairs) >= PAIRS[looks - 1]))


def own_change(fp8: SideSpeed, bf16: SideSpeed) -> Change:
    """FP8's change from base to head less BF16's, as a log ratio. Where its 99 % interval has zero in it, the change is
    common to both precisions."""
    one, two = fp8.moved, bf16.moved
    return Change(one.theta - two.theta, math.hypot(one.error, two.error), min(one.freedom, two.freedom))
