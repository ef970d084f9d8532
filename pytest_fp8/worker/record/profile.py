"""Reads one profiled training step on a GPU: its matrix products, the kernels that ran them, the attention kernels.

The profiler records operators with shapes and dtypes, and the kernels that each one launched. Transformer Engine's
products go through no torch operator: ``record/libraries.py`` marks them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pytest_fp8.questions.layers.evidence import KernelTime
from pytest_fp8.questions.layers.kernels import kernel_family, short_name
from pytest_fp8.questions.layers.products import EVALUATION, FP8, Product
from pytest_fp8.recipes import RECOMPUTE
from pytest_fp8.worker.record.libraries import (
    TE_RANGE,
    te_product,
    watch_recomputation,
    watch_transformer_engine,
)
from pytest_fp8.worker.record.operators import OPERANDS, operand_formats, product_of
from pytest_fp8.worker.record.trace import TraceEvent, busy_time, total_ms
from pytest_fp8.worker.record.wire import dtype_told, exposures, is_collective, wire_times

PHASE = "fp8 phase: "
STEP = "fp8 step"
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
"""The runtime's calls that hold the host until the GPU is done; ``tensor.item()`` makes the first of them."""
CLASSES = ("fp8 products", "other products", "attention", "optimizer", "communication")
"""What is told apart of a step's kernels; all others are the rest."""
NAMED = 48
"""How many kinds of kernels of the rest are told apart."""


def profile_step(step: Callable[[Callable[[str], Any]], Any]) -> dict[str, Any]:
    """Profile one call of ``step``, which is given a function that opens a phase; what :func:`read_profile` gives."""
    import torch

    with (
        watch_transformer_engine(),
        watch_recomputation(lambda: torch.profiler.record_function(PHASE + RECOMPUTE)),
        torch.profiler.profile(record_shapes=True) as profiler,
    ):
        with torch.profiler.record_function(STEP):
            step(lambda name: torch.profiler.record_function(PHASE + name))
        torch.cuda.synchronize()
    return read_profile(plain_events(profiler))


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


def read_profile(events: list[TraceEvent]) -> dict[str, Any]:
    """Products, attention kernels, kernel times (ms) of the profiled step, and its waits for the GPU.

    Products of an evaluation inside the step are listed with that phase; its kernel times are left out, as they are
    from the timed blocks. A kernel belongs to the host range in which it was launched: the CUDA launch call with the
    kernel's correlation number lies inside that range, on the same thread. This holds for operators and for Transformer
    Engine's ranges.
    """
    kernels_of = kernel_finder(events)
    host = sorted((e for e in events if not e.gpu), key=lambda e: (e.start, -e.end))
    wraps_scaled = scaled_finder(host)
    phases = [(e.name.removeprefix(PHASE), e.start, e.end) for e in host if e.name.startswith(PHASE)]
    products: list[Product] = []
    attention: dict[str, set[str]] = {}
    inside: dict[int, int] = {}
    spent = dict.fromkeys(CLASSES, 0)
    counted: set[int] = set()

    evaluated = {id(kernel) for e in host if e.name == PHASE + EVALUATION for kernel in kernels_of(e)}

    def add(what: str, launched: list[TraceEvent]) -> None:
        mine = [kernel for kernel in launched if id(kernel) not in evaluated and id(kernel) not in counted]
        counted.update(map(id, mine))
        spent[what] += sum(kernel.end - kernel.start for kernel in mine)

    for event in host:
        if event.start < inside.get(event.thread, 0):
            continue
        operator = event.name.removeprefix("aten::")
        # The innermost phase: recomputation lies inside the backward phase.
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
            products.append(replace(product, milliseconds=total_ms(kernels_of(event))))
        elif event.name.startswith("aten::") and operator in OPERANDS and not wraps_scaled(event):
            inside[event.thread] = event.end
            product = _product_of_event(event, phase, operator, longest(kernels_of(event)))
            add("fp8 products" if product.kind == FP8 else "other products", kernels_of(event))
            products.append(replace(product, milliseconds=total_ms(kernels_of(event))))
    add("optimizer", [kernel for e in host if e.name == PHASE + "optimizer" for kernel in kernels_of(e)])
    kernels = [event for event in events if event.gpu and id(event) not in evaluated]
    add("communication", [kernel for kernel in kernels if is_collective(kernel)])
    rest = [kernel for kernel in kernels if id(kernel) not in counted]
    return {
        "products": products,
        "attention": {name: sorted(families) for name, families in sorted(attention.items())},
        "milliseconds": kernel_times(spent, kernels, rest),
        "rest": by_name(rest)[:NAMED],
        "wire": wire_times(host, kernels, kernels_of),
        "exposed_ms": sum(alone for _, alone in exposures(kernels)) / 1e6,
        "waits": waits_of(host),
    }


def _product_of_event(event: TraceEvent, phase: str, operator: str, kernel: str) -> Product:
    one, two = OPERANDS[operator]
    fp8 = {"Float8" in event.dtypes[index] for index in (one, two)}
    kind = FP8 if fp8 == {True} else "mixed" if len(fp8) == 2 else dtype_told(event.dtypes[one])
    product = product_of(phase, operator, tuple(event.shapes[one]), tuple(event.shapes[two]), kind, kernel)
    formats = operand_formats(event.dtypes[one], event.dtypes[two])
    return replace(product, formats=formats, fast_accumulation=event.fast_accumulation)


def waits_of(host: list[TraceEvent]) -> dict[str, int]:
    """How often the host waited for the GPU inside the step, by the CUDA call; outside its evaluations."""
    inside = [(event.start, event.end) for event in host if event.name == STEP]
    evaluations = [(event.start, event.end) for event in host if event.name == PHASE + EVALUATION]
    counts: dict[str, int] = {}
    for event in host:
        if event.name not in WAITS or any(a <= event.start < b for a, b in evaluations):
            continue
        if any(a <= event.start < b for a, b in inside):
            counts[event.name] = counts.get(event.name, 0) + 1
    return counts


def scaled_finder(host: list[TraceEvent]) -> Callable[[TraceEvent], bool]:
    """A function that says whether an operator computes its product by a ``_scaled_mm`` inside it.

    Uncompiled, torchao's tensors reach ``aten::mm`` as bfloat16, and their FP8 values are multiplied inside it.
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


def kernel_times(spent: dict[str, int], kernels: list[TraceEvent], rest: list[TraceEvent]) -> dict[str, float]:
    """Milliseconds of one step by kind of kernel. ``busy``: time in which the GPU ran any kernel; a step that takes
    longer waits for the host. ``rest``: in which it ran kernels of the ``rest`` and of no other kind; what casts before
    a gather runs beside products under FSDP2, and what passes beside them is theirs."""
    computing = [kernel for kernel in kernels if not is_collective(kernel)]
    left = set(map(id, rest))
    others = busy_time([kernel for kernel in computing if id(kernel) not in left])
    times = {**spent, "rest": busy_time(computing) - others, "busy": busy_time(kernels)}
    return {name: nanoseconds / 1e6 for name, nanoseconds in times.items()}


def by_name(kernels: list[TraceEvent]) -> list[KernelTime]:
    """The kernels' time by their short name, the longest first."""
    named: dict[str, list[TraceEvent]] = {}
    for kernel in kernels:
        named.setdefault(short_name(kernel.name), []).append(kernel)
    times = [KernelTime(name, len(same), total_ms(same)) for name, same in named.items()]
    return sorted(times, key=lambda time: -time.milliseconds)


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


def ranges_with_kernels(events: list[TraceEvent], prefix: str) -> list[tuple[TraceEvent, list[TraceEvent]]]:
    """Each host range whose name begins with ``prefix``, with the kernels it launched."""
    kernels_of = kernel_finder(events)
    return [(event, kernels_of(event)) for event in events if not event.gpu and event.name.startswith(prefix)]


def longest(launched: list[TraceEvent]) -> str:
    """The name of the kernel that took the most time: a product may come with a split-K reduction or a fill."""
    return max(launched, key=lambda kernel: kernel.end - kernel.start).name if launched else ""
