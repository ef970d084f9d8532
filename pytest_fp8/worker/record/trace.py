"""The events of a profile as plain data, which kernels a host event launched, and the time of several."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
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


def plain_events(profiler: Any) -> list[TraceEvent]:
    """The raw events of a ``torch.profiler.profile``, without copies, fills and annotations on the GPU."""
    import torch

    on_gpu = torch.autograd.DeviceType.CUDA
    plain = []
    for event in profiler.profiler.kineto_results.events():
        gpu = event.device_type() == on_gpu
        if gpu and (event.name().startswith(("Memcpy", "Memset")) or event.is_user_annotation()):
            continue
        start = event.start_ns()
        plain.append(
            TraceEvent(
                name=event.name(),
                gpu=gpu,
                start=start,
                end=start + event.duration_ns(),
                thread=event.start_thread_id(),
                correlation=event.correlation_id(),
                sequence=event.sequence_nr(),
                shapes=tuple(event.shapes()) if not gpu else (),
                dtypes=tuple(event.dtypes()) if not gpu else (),
                fast_accumulation=_fast_accumulation(event) if not gpu else None,
            )
        )
    return plain


def _fast_accumulation(event: Any) -> bool | None:
    """The argument ``use_fast_accum``, the eighth of ``_scaled_mm``; ``None`` where the profiler does not keep it."""
    if event.name() != "aten::_scaled_mm" or not hasattr(event, "concrete_inputs"):
        return None
    given = event.concrete_inputs()
    return given[7] if len(given) > 7 and isinstance(given[7], bool) else None


LAUNCHES = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cuGraphLaunch")


def kernel_finder(events: list[TraceEvent]) -> Callable[[TraceEvent], list[TraceEvent]]:
    """A function that gives the kernels launched inside a host event."""
    launches = {e.correlation: e for e in events if not e.gpu and e.name.startswith(LAUNCHES)}
    launched: dict[int, list[tuple[int, TraceEvent]]] = {}
    for kernel in events:
        call = launches.get(kernel.correlation) if kernel.gpu else None
        if call is not None:
            launched.setdefault(call.thread, []).append((call.start, kernel))
    for calls in launched.values():
        calls.sort(key=lambda pair: pair[0])

    def kernels_of(event: TraceEvent) -> list[TraceEvent]:
        calls = launched.get(event.thread, [])
        first = bisect_left(calls, event.start, key=lambda pair: pair[0])
        last = bisect_left(calls, event.end, key=lambda pair: pair[0])
        return [kernel for _, kernel in calls[first:last]]

    return kernels_of


def longest(launched: list[TraceEvent]) -> str:
    """The name of the kernel that took the most time: a product may come with a split-K reduction or a fill."""
    return max(launched, key=lambda kernel: kernel.end - kernel.start).name if launched else ""


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
