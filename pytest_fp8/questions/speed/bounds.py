"""What a measured speedup is held against: a floor, a baseline, or both. Reads old arguments too."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SpeedBounds:
    """The bounds of one question about speed."""

    question: str
    """The name under which the decision is noted: ``faster`` or ``speedup``."""
    floor: float | None
    """The speedup over BF16 to exceed; ``None`` for none."""
    against_baseline: bool


def bounds_of(floor: float, old: Sequence[Any], old_named: Mapping[str, Any]) -> SpeedBounds:
    """The bounds of ``fp8_pair.speedup``. ``floor``: the case's own; ``old``, ``old_named``: arguments of earlier
    versions, where there are any. Raises ``TypeError`` for an argument that never was one."""
    unknown = sorted(old_named.keys() - {"floor", "against_baseline"})
    if unknown:
        raise TypeError(f"speedup() has no argument {unknown[0]!r}; a floor is asked for by assert_faster(floor=...)")
    if old or old_named:
        return _old_bounds(floor, *old, **old_named)
    return SpeedBounds("speedup", None, against_baseline=True)


def _old_bounds(case_floor: float, floor: float | None = -1.0, against_baseline: bool = True) -> SpeedBounds:
    """``floor``: -1.0 for the case's own, ``None`` for none."""
    bound = case_floor if floor == -1.0 else floor
    number = "" if floor in (-1.0, None) else f"floor={floor:g}"
    if not against_baseline:
        instead = f"assert_faster({number})" if bound is not None else "timing_evidence()"
    elif bound is None:
        instead = "assert_speedup()"
    else:
        instead = f"assert_faster({number}) and assert_speedup()"
    warnings.warn(
        f"speedup(floor=..., against_baseline=...) is two questions now: write fp8_pair.{instead}",
        DeprecationWarning,
        stacklevel=4,
    )
    question = "faster" if floor is not None and not against_baseline else "speedup"
    return SpeedBounds(question, bound, against_baseline)
