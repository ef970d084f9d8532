"""One event of a profile as plain data, and the time of several."""

from __future__ import annotations

from collections.abc import Iterable
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


def total_ms(kernels: Iterable[TraceEvent]) -> float:
    """Milliseconds of all kernels together, whether or not they ran at the same time."""
    return sum(kernel.end - kernel.start for kernel in kernels) / 1e6
