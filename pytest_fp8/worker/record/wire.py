"""What travels between ranks: which operators are collectives, of how many bytes, and the time of their kernels."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from pytest_fp8.questions.layers.evidence import WireTime
from pytest_fp8.worker.record.trace import TraceEvent, busy_spans, total_ms

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
    rows: dict[tuple[str, str], WireTime] = {}

    def add(kind: str, tensor: tuple[str, int, int], launched: Collection[TraceEvent]) -> None:
        dtype, elements, size = tensor
        row = rows.get((kind, dtype), WireTime(kind, dtype, 0, 0, 0, 0.0))
        rows[kind, dtype] = replace(
            row,
            count=row.count + 1,
            elements=row.elements + elements,
            bytes=row.bytes + size,
            milliseconds=row.milliseconds + total_ms(launched),
        )

    for event in reversed(host) if left else ():
        if event.name.startswith(SPACES) and kind_of(event.name):
            mine = [left.pop(id(kernel)) for kernel in kernels_of(event) if id(kernel) in left]
            if mine:
                within = [a for a in annotations if a.thread == event.thread and event.start <= a.start < event.end]
                add(kind_of(event.name), _largest([event, *within]), mine)
    for kernel in left.values():
        add(kind_of(kernel.name) or "other", ("", 0, 0), [kernel])
    return sorted(rows.values(), key=lambda row: -row.milliseconds)


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
