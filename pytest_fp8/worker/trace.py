"""One event of a profile as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TraceEvent:
    """What is read of one of the profiler's events. Times in nanoseconds."""

    name: str
    gpu: bool
    start: int
    end: int
    thread: int
    correlation: int
    shapes: tuple[Any, ...] = ()
    dtypes: tuple[str, ...] = ()
    fast_accumulation: bool | None = None
    """Of ``aten::_scaled_mm``: its argument ``use_fast_accum``."""
