"""The events of a profile as plain data: which kernels a host event launched, their time, and what travels between
ranks."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from pytest_fp8.questions.layers.evidence import WireTime


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
    # Private: the public events() have no correlation numbers, by which a kernel has its launch.
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


def inner_finder(host: Sequence[TraceEvent]) -> Callable[[TraceEvent], list[TraceEvent]]:
    """A function that gives the host's events inside one, of its thread. ``host``: in order of their starts."""
    threads: dict[int, list[TraceEvent]] = defaultdict(list)
    for event in host:
        threads[event.thread].append(event)
    starts = {thread: [event.start for event in mine] for thread, mine in threads.items()}

    def inside(event: TraceEvent) -> list[TraceEvent]:
        mine, first = threads[event.thread], bisect_left(starts[event.thread], event.start)
        last = bisect_left(starts[event.thread], event.end)
        return [other for other in mine[first:last] if other is not event]

    return inside


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


# -- between ranks -----------------------------------------------------------------------------------------------------

SPACES = ("c10d::", "_c10d_functional::")
"""How the names of operators begin that send between ranks."""
WORDS = {
    "gather": "all-gather",
    "reducescatter": "reduce-scatter",
    "allreduce": "all-reduce",
    "broadcast": "broadcast",
    "alltoall": "all-to-all",
}
KERNEL = "nccl"
"""How the names of NCCL's kernels begin."""
ANNOTATION = "nccl:"
"""The range in which NCCL launches. It names tensors that its operator takes in a list, whose shapes no profile has."""
SIZES = {
    "c10::BFloat16": ("bfloat16", 2),
    "c10::Half": ("float16", 2),
    "float": ("float32", 4),
    "double": ("float64", 8),
    "unsigned char": ("uint8", 1),
    "signed char": ("int8", 1),
    "int": ("int32", 4),
    "long int": ("int64", 8),
    "c10::Float8_e4m3fn": ("float8_e4m3fn", 1),
    "c10::Float8_e5m2": ("float8_e5m2", 1),
}
"""A profile's word for a type -> torch's, and its bytes."""


def dtype_told(word: str) -> str:
    """torch's name of the type that a profile tells by this word; the word itself where it is another."""
    return SIZES.get(word, (word, 0))[0]


def kind_of(name: str) -> str:
    """The kind of collective that an operator or a kernel of NCCL's is; empty where its name says none."""
    plain = name.partition("(")[0].replace("_", "").lower()
    return next((word for part, word in WORDS.items() if part in plain), "")


def is_collective(kernel: TraceEvent) -> bool:
    return kernel.name.startswith(KERNEL)


def exposures(kernels: Sequence[TraceEvent]) -> list[tuple[str, int]]:
    """Kind of each collective, in the order in which they begin, and nanoseconds of it in which no other kernel runs,
    and no collective that began before it: what nothing hides."""
    hidden, reached, found = busy_spans([k for k in kernels if not is_collective(k)]), 0, []
    for kernel in sorted(filter(is_collective, kernels), key=lambda k: k.start):
        start = max(kernel.start, reached)
        reached = max(reached, kernel.end)
        alone = max(0, kernel.end - start)
        index = max(0, bisect_right(hidden, (start,)) - 1)
        while index < len(hidden) and hidden[index][0] < kernel.end:
            alone -= max(0, min(hidden[index][1], kernel.end) - max(hidden[index][0], start))
            index += 1
        found.append((kind_of(kernel.name), alone))
    return found


def wire_times(
    host: Sequence[TraceEvent], kernels: Sequence[TraceEvent], kernels_of: Callable[[TraceEvent], list[TraceEvent]]
) -> list[WireTime]:
    """What travelled in the step whose ``kernels`` these are. ``host``: the profile's events on the host, in order.

    A kernel belongs to the innermost operator that launched it. One that no operator launched, as where several
    collectives are joined, says what it is by its name.
    """
    left = {id(kernel): kernel for kernel in kernels if is_collective(kernel)}
    annotations = [event for event in host if event.name.startswith(ANNOTATION)] if left else []
    found: dict[tuple[str, str], list[tuple[int, int, float]]] = defaultdict(list)
    for event in reversed(host) if left else ():
        if event.name.startswith(SPACES) and kind_of(event.name):
            mine = [left.pop(id(kernel)) for kernel in kernels_of(event) if id(kernel) in left]
            if mine:
                within = [a for a in annotations if a.thread == event.thread and event.start <= a.start < event.end]
                dtype, elements, size = _largest([event, *within])
                found[kind_of(event.name), dtype].append((elements, size, total_ms(mine)))
    for kernel in left.values():
        found[kind_of(kernel.name) or "other", ""].append((0, 0, total_ms([kernel])))
    rows = [WireTime(*kind, len(each), *map(sum, zip(*each, strict=True))) for kind, each in found.items()]
    return sorted(rows, key=lambda row: -row.milliseconds)


def _largest(events: Sequence[TraceEvent]) -> tuple[str, int, int]:
    """Type, elements and bytes of the largest tensor among the arguments of events; nothing where none is known."""

    def tensors() -> Iterator[tuple[str, int, int]]:
        for event in events:
            for dtype, shape in zip(event.dtypes, event.shapes, strict=False):
                if dtype in SIZES and _is_shape(shape):
                    name, size = SIZES[dtype]
                    yield name, prod(shape), prod(shape) * size

    return max(tensors(), key=lambda tensor: tensor[2], default=("", 0, 0))


def _is_shape(shape: Any) -> bool:
    """Of a list of tensors a profile has nothing, or a list of shapes."""
    return all(isinstance(size, int) for size in shape)
