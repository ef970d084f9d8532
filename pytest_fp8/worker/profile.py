"""Reads one profiled training step on a GPU: its matrix products, the kernels that ran them, the attention kernels.

The profiler sees operators with shapes and types, and the kernels each one launched. Transformer Engine's products pass
through no torch operator: ``te_products.py``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from pytest_fp8.questions.layers.kernels import kernel_family
from pytest_fp8.questions.layers.products import EVALUATION, FP8, Product
from pytest_fp8.recipes import RECOMPUTE
from pytest_fp8.worker.observe import OPERANDS, product_of
from pytest_fp8.worker.recomputation import watch_recomputation
from pytest_fp8.worker.te_products import TE_RANGE, te_product, watch_transformer_engine

PHASE = "fp8 phase: "


def profile_step(step: Callable[[Callable[[str], Any]], Any]) -> dict[str, Any]:
    """One profiled step: its products, the GEMM kernels without an operator, the attention operators and kernels."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with (
        watch_transformer_engine(),
        watch_recomputation(lambda: torch.profiler.record_function(PHASE + RECOMPUTE)),
        torch.profiler.profile(activities=activities, record_shapes=True) as profiler,
    ):
        step(lambda name: torch.profiler.record_function(PHASE + name))
        torch.cuda.synchronize()
    assert profiler.profiler is not None
    return read_profile(plain_events(profiler.profiler.kineto_results.events()))


@dataclass(frozen=True)
class TraceEvent:
    """One event of the profiler, as plain data: what :func:`read_profile` needs and a test can write by hand."""

    name: str
    gpu: bool
    start: int
    end: int
    thread: int
    correlation: int
    shapes: tuple[Any, ...] = ()
    dtypes: tuple[str, ...] = ()


def plain_events(events: list[Any]) -> list[TraceEvent]:
    """The profiler's raw events without those that copy or annotate on the GPU's own timeline."""
    on_gpu = torch.autograd.DeviceType.CUDA
    plain = []
    for event in events:
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
                shapes=tuple(event.shapes()) if not gpu else (),
                dtypes=tuple(event.dtypes()) if not gpu else (),
            )
        )
    return plain


def read_profile(events: list[TraceEvent]) -> dict[str, Any]:
    """Products, attention and kernel times of the profiled step; of an evaluation in it the products alone, which say
    where they belong: no block of timed steps has its time.

    A kernel belongs to the host range in which it was launched: the CUDA launch call with the kernel's correlation
    number lies inside it, on the same thread. That holds for operators and for Transformer Engine's ranges alike.
    """
    kernels_of = kernel_finder(events)
    host = sorted((e for e in events if not e.gpu), key=lambda e: (e.start, -e.end))
    wraps_scaled = scaled_finder(host)
    phases = [(e.name.removeprefix(PHASE), e.start, e.end) for e in host if e.name.startswith(PHASE)]
    products: list[Product] = []
    attention: dict[str, set[str]] = {}
    inside: dict[int, int] = {}
    spent = dict.fromkeys(("fp8 products", "other products", "attention"), 0)

    evaluated = {id(kernel) for e in host if e.name == PHASE + EVALUATION for kernel in kernels_of(e)}

    def add(what: str, launched: list[TraceEvent]) -> None:
        spent[what] += sum(kernel.end - kernel.start for kernel in launched if id(kernel) not in evaluated)

    for event in host:
        if event.start < inside.get(event.thread, 0):
            continue
        operator = event.name.removeprefix("aten::")
        # The innermost: what is recomputed lies inside the backward phase.
        phase = next((name for name, start, end in reversed(phases) if start <= event.start < end), "")
        if event.name.startswith("aten::") and "attention" in operator:
            families = {kernel_family(k.name) for k in kernels_of(event)}
            if families:
                add("attention", kernels_of(event))
                inside[event.thread] = event.end
                attention.setdefault(operator, set()).update(families)
        elif event.name.startswith(TE_RANGE):
            inside[event.thread] = event.end
            product = te_product(phase, event.name, longest(kernels_of(event)))
            add("fp8 products" if product.kind == FP8 else "other products", kernels_of(event))
            products.append(product)
        elif event.name.startswith("aten::") and operator in OPERANDS and not wraps_scaled(event):
            inside[event.thread] = event.end
            one, two = OPERANDS[operator]
            fp8 = {"Float8" in event.dtypes[index] for index in (one, two)}
            kind = FP8 if fp8 == {True} else "mixed" if len(fp8) == 2 else _dtype_name(event.dtypes[one])
            left_shape, right_shape = tuple(event.shapes[one]), tuple(event.shapes[two])
            add("fp8 products" if kind == FP8 else "other products", kernels_of(event))
            products.append(product_of(phase, operator, left_shape, right_shape, kind, longest(kernels_of(event))))
    return {
        "products": products,
        "attention": {name: sorted(families) for name, families in sorted(attention.items())},
        "milliseconds": kernel_times(spent, [event for event in events if event.gpu and id(event) not in evaluated]),
    }


def scaled_finder(host: list[TraceEvent]) -> Callable[[TraceEvent], bool]:
    """A function that says whether another operator's product is computed by a scaled one inside it.

    Uncompiled, torchao's tensors reach ``aten::mm`` as what they stand for, bfloat16, and only inside it multiply their
    FP8 values.
    """
    starts: dict[int, list[int]] = {}
    for event in host:
        if event.name.startswith("aten::_scaled_mm"):
            starts.setdefault(event.thread, []).append(event.start)

    def wraps_scaled(event: TraceEvent) -> bool:
        mine = starts.get(event.thread, [])
        first = bisect_left(mine, event.start)
        return not event.name.startswith("aten::_scaled_mm") and first < len(mine) and mine[first] < event.end

    return wraps_scaled


def kernel_times(spent: dict[str, int], kernels: list[TraceEvent]) -> dict[str, float]:
    """Milliseconds of one step by kind of kernel. ``busy``: time in which the GPU ran any kernel at all; a step that
    takes longer than that waits for the host."""
    busy, reached = 0, 0
    for kernel in sorted(kernels, key=lambda k: k.start):
        busy += max(0, kernel.end - max(kernel.start, reached))
        reached = max(reached, kernel.end)
    total = sum(kernel.end - kernel.start for kernel in kernels)
    times = {**spent, "rest": total - sum(spent.values()), "busy": busy}
    return {name: nanoseconds / 1e6 for name, nanoseconds in times.items()}


def kernel_finder(events: list[TraceEvent]) -> Callable[[TraceEvent], list[TraceEvent]]:
    """A function that gives the kernels launched inside a host event."""
    launches = {e.correlation: e for e in events if not e.gpu and e.name.startswith(("cudaLaunch", "cuLaunch"))}
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


def ranges_with_kernels(events: list[TraceEvent], prefix: str) -> list[tuple[TraceEvent, list[TraceEvent]]]:
    """Each host range of that name with the kernels it launched."""
    kernels_of = kernel_finder(events)
    return [(event, kernels_of(event)) for event in events if not event.gpu and event.name.startswith(prefix)]


def longest(launched: list[TraceEvent]) -> str:
    """The kernel that took the most time: a product may be accompanied by a split-K reduction or a fill."""
    return max(launched, key=lambda kernel: kernel.end - kernel.start).name if launched else ""


def _dtype_name(text: str) -> str:
    return {"c10::BFloat16": "bfloat16", "float": "float32", "c10::Half": "float16"}.get(text, text)


# -- kernel families, learned -----------------------------------------------------------------------------------------

KNOWN = "fp8 known product: "


def learn_families(products: list[Product], most: int = 8) -> dict[str, list[str]]:
    """Which kernel families multiply FP8 here and which BF16, learned from products known to be one or the other.

    Runs ``torch.mm`` on BF16 and ``torch._scaled_mm`` on FP8 operands at up to ``most`` of the step's own extents, and
    reads the kernels' names. Names change with cuBLAS, so none is written down anywhere. A family seen in both is
    in neither list.
    """
    extents = sorted({(p.outer[0], p.inner, p.outer[1]) for p in products if min(p.inner, *p.outer) >= 64})
    chosen = extents[:: max(1, len(extents) // most)][:most]
    device = "cuda"
    one = torch.ones((), device=device)

    def run_known() -> None:
        for m, k, n in chosen:
            left, right = torch.randn(m, k, device=device).bfloat16(), torch.randn(n, k, device=device).bfloat16()
            with torch.profiler.record_function(KNOWN + "bfloat16"):
                left @ right.t()
            if m % 16 or k % 16 or n % 16:
                continue
            e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
            for a_type, b_type in ((e4m3, e4m3), (e5m2, e4m3), (e4m3, e5m2)):
                a, b = left.to(a_type), right.to(b_type).t()
                with torch.profiler.record_function(KNOWN + FP8):
                    torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
            rows, columns = torch.ones(m, 1, device=device), torch.ones(1, n, device=device)
            with torch.profiler.record_function(KNOWN + FP8):
                torch._scaled_mm(
                    left.to(e4m3),
                    right.to(e4m3).t(),
                    scale_a=rows,
                    scale_b=columns,
                    out_dtype=torch.bfloat16,
                    use_fast_accum=True,
                )
        torch.cuda.synchronize()

    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        run_known()
    assert profiler.profiler is not None
    events = plain_events(profiler.profiler.kineto_results.events())
    seen: dict[str, set[str]] = {FP8: set(), "bfloat16": set()}
    for event, kernels in ranges_with_kernels(events, KNOWN):
        if kernels:
            seen[event.name.removeprefix(KNOWN)].add(kernel_family(longest(kernels)))
    return {kind: sorted(families - seen["bfloat16" if kind == FP8 else FP8]) for kind, families in seen.items()}
