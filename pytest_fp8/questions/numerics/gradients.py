"""Compares the arms' gradients by their sketches, parameter by parameter. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pytest_fp8.codes import D, N
from pytest_fp8.floats import of_text
from pytest_fp8.questions.findings import finding, some
from pytest_fp8.questions.numerics.evidence import NumericsEvidence
from pytest_fp8.questions.numerics.limits import GAIN_OF_MOVED, LEAST_VALUES, UNDECIDED, Limits
from pytest_fp8.verdicts import Finding, Verdict

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Vectors = dict[str, NDArray[Any]]
    """Parameter -> its gradient's sketch."""


@dataclass(frozen=True)
class Difference:
    """The gradient of one parameter in the FP8 arm, against the reference's."""

    parameter: str
    relative: float
    """|FP8 - BF16| / |BF16|."""
    gain: float
    """<FP8, BF16> / |BF16|^2."""
    cosine: float
    moved: float
    """|moved - BF16| / |BF16|: what weights that are moved as much as FP8 moves products do to it. The largest of all
    ways in which they were moved."""
    moved_gain: float = 0.0
    """The largest difference of a moved gradient's gain to 1; 0 where weights were moved in one way only."""

    def limit(self, limits: Limits) -> float:
        """Of the relative difference."""
        return limits.gradients * self.moved

    def gain_limit(self, limits: Limits) -> float:
        """Of the gain's difference to 1, where the gain is what is judged."""
        return max(GAIN_OF_MOVED * self.moved, limits.gradients * self.moved_gain)

    @property
    def length(self) -> float:
        """|FP8| / |BF16|."""
        return math.sqrt(max(self.relative**2 + 2 * self.gain - 1, 0.0))

    @property
    def rest(self) -> float:
        """The relative difference that is left once the gradient is divided by its gain."""
        if not self.gain:
            return math.inf
        noise = self.relative**2 - (1 - self.gain) ** 2
        return math.sqrt(max(noise, 0.0)) / abs(self.gain)

    @property
    def judged(self) -> bool:
        """Whether any limit tells a wrong gradient from what moved weights make of it. One that is not finite is
        wrong beside any that is."""
        return self.moved < UNDECIDED or (math.isfinite(self.moved) and not math.isfinite(self.relative))

    def by_gain(self, limits: Limits) -> bool:
        """Whether the gradient is so sensitive that only its gain tells a wrong one."""
        return self.moved < UNDECIDED <= self.limit(limits)

    def wrong(self, limits: Limits) -> bool:
        """Not "more than the limit": a gradient that is not finite is within no limit."""
        if self.by_gain(limits):
            return not abs(self.gain - 1) <= self.gain_limit(limits)
        return self.judged and not self.relative <= self.limit(limits)

    def expected(self, limits: Limits) -> str:
        if self.by_gain(limits):
            return f"1 +-{self.gain_limit(limits):.2f} times BF16's gradient of {self.parameter}"
        return f"at most {self.limit(limits):.1%} from BF16's gradient of {self.parameter}"


def differences(evidence: NumericsEvidence) -> list[Difference]:
    """Of each parameter with a gradient in the reference, in the order of the backward pass."""
    import numpy as np

    texts = (arm.sketches for arm in (evidence.bf16.gradients, evidence.fp8.gradients, *evidence.moved))
    arms = [{name: np.array(of_text(text), dtype=np.float64) for name, text in arm.items()} for arm in texts]
    reference, mine, first, *further = arms
    with np.errstate(invalid="ignore", over="ignore"):
        found: list[Difference] = []
        for name, bf16 in reference.items():
            fp8, moved = mine.get(name), first.get(name)
            if fp8 is None and name in evidence.fp8.gradients.silent:
                fp8 = np.zeros_like(bf16)
            length = float(np.linalg.norm(bf16))
            if fp8 is None or moved is None or not length or np.count_nonzero(bf16) < LEAST_VALUES:
                continue
            own = float(np.linalg.norm(fp8))
            relative, gain = _apart(fp8, bf16)
            cosine = gain * length / own if own else 0.0
            found.append(Difference(name, relative, gain, cosine, _apart(moved, bf16)[0]))
        # Of one draw: a parameter that it happened to move little is taken to move half as much as others.
        middle = float(np.median([each.moved for each in found])) if found else 0.0
        return [_widened(d, middle / 2, reference, further) if math.isfinite(d.moved) else d for d in found]


def find_apart(evidence: NumericsEvidence) -> Finding | None:
    """Ranks with gradients of their own in one arm alone. In both arms they may be reduced later, and the loss question
    looks at the weights."""
    fp8, bf16 = evidence.fp8.gradients.apart, evidence.bf16.gradients.apart
    if bool(fp8) == bool(bf16):
        return None
    arm, other = ("FP8", "BF16") if fp8 else ("BF16", "FP8")
    expected = f"after the backward pass the same gradients on every rank, as in the {other} arm"
    return finding(D.NOT_REDUCED, expected, fp8 or bf16, Verdict.FAIL if fp8 else Verdict.INVALID, arm=arm)


def _widened(d: Difference, least: float, reference: Vectors, further: Sequence[Vectors]) -> Difference:
    """The difference with the largest of what all ways of moving weights do, and at least ``least``."""
    more = [_apart(moved[d.parameter], reference[d.parameter]) for moved in further if d.parameter in moved]
    sizes = [relative for relative, _ in more if math.isfinite(relative)]
    gains = [abs(gain - 1) for _, gain in more if math.isfinite(gain)]
    return replace(d, moved=max(d.moved, least, *sizes), moved_gain=max(gains, default=0.0))


def _apart(moved: NDArray[Any], bf16: NDArray[Any]) -> tuple[float, float]:
    """(|moved - BF16| / |BF16|, <moved, BF16> / |BF16|^2)."""
    import numpy as np

    square = float(bf16 @ bf16)
    return float(np.linalg.norm(moved - bf16)) / math.sqrt(square), float(moved @ bf16) / square


def too_sensitive(found: Sequence[Difference]) -> Finding | None:
    """INCONCLUSIVE where most gradients are rounding noise: no limit would tell a wrong one."""
    open_ones = [d for d in found if not d.judged]
    if 2 * len(open_ones) <= len(found):
        return None
    limit = f"gradients that move by less than {UNDECIDED:.0%} where weights are moved as much as FP8 moves products"
    seen = some([f"{d.parameter} {d.moved:.0%}" for d in open_ones])
    return finding(N.TOO_SENSITIVE, limit, seen, Verdict.INCONCLUSIVE, count=len(open_ones), of=len(found))
