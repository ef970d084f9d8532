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
    sequence: int = -1
    """Of an operator that adds to autograd's graph: the number of its node; of others -1."""
    fast_accumulation: bool | None = None
    """Of ``aten::_scaled_mm``: its argument ``use_fast_accum``."""


def total_ms(kernels: Iterable[TraceEvent]) -> float:
    """Milliseconds of all kernels together, whether or not they ran at the same time."""
    return sum(kernel.end - kernel.start for kernel in kernels) / 1e6


def busy_spans(kernels: Iterable[TraceEvent]) -> list[tuple[int, int]]:
    """When any of the kernels ran: spans in nanoseconds, in order, none of which touches the next."""
    spans: list[tuple[int, int]] = []
    for kernel in sorted(kernels, key=lambda k: k.start):
        if spans and kernel.start <= spans[-1][1]:
            spans[-1] = spans[-1][0], max(spans[-1][1], kernel.end)
        else:
            spans.append((kernel.start, kernel.end))
    return spans


def busy_time(kernels: Iterable[TraceEvent]) -> int:
    """Nanoseconds in which any of the kernels ran."""
    return sum(end - start for start, end in busy_spans(kernels))
