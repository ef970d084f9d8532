"""The profiled window of a script: its phases, its products, its times. Read by :mod:`worker.record.profile`.

Nothing in the script marks a phase. autograd's engine names each node that it runs: from the first to the last lies a
backward pass. An operator in it that adds a node to the graph recomputes; all after the last one is the optimizer's.
What ran without gradients before the forward pass is an evaluation.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pytest_fp8.questions.layers.evidence import KernelTime
from pytest_fp8.questions.layers.products import EVALUATION, TRAINING, Product
from pytest_fp8.recipes import RECOMPUTE
from pytest_fp8.worker.record.libraries import TE_RANGE
from pytest_fp8.worker.record.operators import OPERANDS
from pytest_fp8.worker.record.profile import PHASE, STEP, read_profile, wraps_scaled
from pytest_fp8.worker.record.trace import TraceEvent, inner_finder

ENGINE = "autograd::engine::evaluate_function: "
COMPILED = ("CompiledFunction", "## Call CompiledFxGraph")
"""Ranges of compiled code. ``Torch-Compiled Region`` is wider: it holds what runs uncompiled at a graph break."""
LOADER = "enumerate(DataLoader)"
BACKWARD, OPTIMIZER = "backward", "optimizer"
PRODUCT_KERNEL = re.compile(r"nvjet|gemm|matmul|xmma|cutlass.*mma|triton_tem", re.IGNORECASE)
FP8_KERNEL = re.compile(r"nvjet_sm\d+_[qr][qr]|e4m3|e5m2|fp8|float8|w8a8|_scaled_mm", re.IGNORECASE)
CAST_KERNEL = re.compile(
    r"amax|abs_max|absfunctor|maxops|float8|fp8|quantize|cast_transpose|_scaled_mm|e4m3", re.IGNORECASE
)
"""Kernels whose names say that they find the largest value or round to FP8. Where a compiler fuses that into a norm or
an activation, all of the kernel counts."""


@dataclass(frozen=True)
class Window:
    """One profiled step."""

    products: Sequence[Product]
    """Without those of the optimizer and of an evaluation."""
    evaluated: Sequence[Product]
    backward_passes: int
    compiled: int
    """Products in FP8 that ran inside a compiled region."""
    compiles: bool
    """Whether it has a compiled region."""
    emulated: int
    """Products whose operands held FP8 values and were multiplied in a wider type."""
    input_wait_ms: float
    waits: int
    """Values that the host read from tensors: ``.item()`` and its like."""
    milliseconds: dict[str, float]
    """GPU time by kind of kernel, ``casts``, and ``busy``. All 0 on a CPU."""
    loose: Sequence[KernelTime]
    """Kernels with a product's name that no seen operator launched, as in a replayed CUDA graph."""
    read: Mapping[str, Any]
    """All that :func:`read_profile` gives of the step."""


def read_window(rows: Iterable[Sequence[Any]]) -> Window:
    """``rows``: the fields of :class:`TraceEvent`, as the observer wrote them."""
    events = [TraceEvent(*row) for row in rows]
    host = sorted((event for event in events if not event.gpu), key=lambda event: (event.start, -event.end))
    widened = {id(event): event for event in host}
    emulated = emulated_products(host)
    for event, kind in emulated:
        widened[id(event)] = replace(event, dtypes=tuple(kind for _ in event.dtypes))
    phases = phases_of(host)
    whole = TraceEvent(STEP, False, min(e.start for e in host), max(e.end for e in host), 0, 0)
    read = read_profile([*(widened.get(id(event), event) for event in events), *phases, whole])
    products = [replace(product, phase=product.phase or "forward") for product in read["products"]]
    evaluation = next((phase for phase in phases if phase.name == PHASE + EVALUATION), None)
    trained = [event for event in host if evaluation is None or event.start >= evaluation.end]
    loose = [kernel for kernel in read["rest"] if PRODUCT_KERNEL.search(kernel.name)]
    casting = [kernel for kernel in read["rest"] if CAST_KERNEL.search(kernel.name) and kernel not in loose]
    casts = sum(kernel.milliseconds for kernel in casting)
    regions = [event for event in host if event.name.removeprefix(ENGINE).startswith(COMPILED)]
    return Window(
        [product for product in products if product.phase in TRAINING],
        [product for product in products if product.phase == EVALUATION],
        sum(phase.name == PHASE + BACKWARD for phase in phases),
        compiled_products(host, regions),
        bool(regions),
        sum(kind.startswith("Float8") for _, kind in emulated),
        sum(event.end - event.start for event in trained if event.name.startswith(LOADER)) / 1e6,
        sum(event.name == "aten::_local_scalar_dense" for event in trained),
        {**read["milliseconds"], "casts": casts, "rest": max(0.0, read["milliseconds"]["rest"] - casts)},
        loose,
        read,
    )


def phases_of(host: Sequence[TraceEvent]) -> list[TraceEvent]:
    """Ranges in the words of :func:`read_profile`: backward passes, what they recompute, and the optimizer."""
    nodes = [event for event in host if event.name.startswith(ENGINE)]
    if not nodes:
        return []
    named = {event.name.removeprefix(ENGINE) for event in nodes}
    spans: list[list[int]] = []
    outside = sorted(event.start for event in host if event.name.startswith(("aten::", TE_RANGE)))

    def quiet(start: int, end: int) -> bool:
        return bisect_left(outside, start) == bisect_left(outside, end)

    for node in nodes:
        # No operator ran between two nodes: both are of one pass.
        if spans and (node.start < spans[-1][1] or quiet(spans[-1][1], node.start)):
            spans[-1][1] = max(spans[-1][1], node.end)
        else:
            spans.append([node.start, node.end])
    found = [TraceEvent(PHASE + BACKWARD, False, start, end, 0, 0) for start, end in spans]
    starts, recomputed = [start for start, _ in spans], 0
    for event in host:
        if event.sequence < 0 or event.start < recomputed or event.name.startswith(ENGINE) or event.name in named:
            continue
        index = bisect_left(starts, event.start + 1) - 1
        if index >= 0 and event.end <= spans[index][1]:
            recomputed = event.end
            found.append(replace(event, name=PHASE + RECOMPUTE, sequence=-1, shapes=(), dtypes=()))
    # Kernels belong to a range of the thread that launched them; the engine has a thread of its own on a GPU.
    own = next((event.thread for event in reversed(host) if not event.name.startswith(ENGINE)), 0)
    end = max(event.end for event in host)
    numbers = [event.sequence for event in host if event.name in named and spans[0][0] <= event.start < spans[0][1]]
    found += evaluations(host, min((each for each in numbers if each >= 0), default=-1), spans[0][0])
    return [*found, TraceEvent(PHASE + OPTIMIZER, False, spans[-1][1], end + 1, own, 0)]


def evaluations(host: Sequence[TraceEvent], first: int, backward: int) -> list[TraceEvent]:
    """The evaluation before the forward pass, if there was one. ``first``: the number of that pass's first node.

    With gradients an operator has the number of the next node, and without them none. A function of the script's own
    has a number in both, and its operators have none.
    """
    before = [event for event in host if event.start < backward]
    forward = max((event for event in before if event.sequence == first >= 0), key=lambda e: e.start, default=None)
    if forward is None:
        return []
    mine = [event for event in before if event.thread == forward.thread and event.start < forward.start]
    start, end, inside, products = forward.start, 0, 0, 0
    for event in mine:
        if event.sequence >= 0:
            inside = max(inside, event.end)
        elif event.name.startswith("aten::") and event.start >= inside:
            start, end = min(start, event.start), max(end, event.end)
    for event in mine:
        operator = event.name.removeprefix("aten::")
        products += start <= event.start < end and (operator in OPERANDS or event.name.startswith(TE_RANGE))
    return [TraceEvent(PHASE + EVALUATION, False, start, end, forward.thread, 0)] if products else []


def emulated_products(host: Sequence[TraceEvent]) -> list[tuple[TraceEvent, str]]:
    """Operators that multiply FP8 values in a wider type inside them, with the type that their operands then are.

    torchao's emulation does: its ``aten::mm`` widens both operands' FP8 values and multiplies those.
    """
    inside = inner_finder(host)
    found = []
    for event in host:
        operator = event.name.removeprefix("aten::")
        if operator not in OPERANDS or "scaled" in operator or any("Float8" in dtype for dtype in event.dtypes):
            continue
        inner = inside(event)
        if not any(each.name.removeprefix("aten::") in OPERANDS for each in inner):
            continue
        if wraps_scaled(event, inner):
            continue
        widened = [each for each in inner if each.name == "aten::_to_copy" and "Float8" in "".join(each.dtypes[:1])]
        if widened:
            found.append((event, "Float8, emulated" if len(widened) > 1 else "mixed, emulated"))
    return found


def compiled_products(host: Sequence[TraceEvent], regions: Sequence[TraceEvent]) -> int:
    """How many FP8 operators lie inside a compiled region, forward or backward."""
    inside = inner_finder(host)
    found = {id(each) for region in regions for each in inside(region) if each.name.startswith("aten::_scaled_")}
    return len(found)
