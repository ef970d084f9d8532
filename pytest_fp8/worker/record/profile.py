"""Reads one profiled training step on a GPU: its matrix products, the kernels that ran them, the attention kernels.

The profiler records operators with shapes and dtypes, and the kernels that each one launched. Transformer Engine's
products go through no torch operator: ``record/libraries.py`` marks them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from pytest_fp8.questions.layers.evidence import KernelTime
from pytest_fp8.questions.layers.kernels import kernel_family, short_name
from pytest_fp8.questions.layers.products import EVALUATION, FP8, Product
from pytest_fp8.recipes import RECOMPUTE
from pytest_fp8.worker.record.libraries import TE_RANGE, te_product, watch_recomputation, watch_transformer_engine
from pytest_fp8.worker.record.operators import OPERANDS, operand_formats, product_of
from pytest_fp8.worker.record.trace import (
    TraceEvent,
    busy_time,
    dtype_told,
    exposures,
    inner_finder,
    is_collective,
    kernel_finder,
    longest,
    plain_events,
    total_ms,
    wire_times,
)

PHASE = "fp8 phase: "
STEP = "fp8 step"
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
"""The runtime's calls that hold the host until the GPU is done; ``tensor.item()`` makes the first of them."""
CLASSES = ("fp8 products", "other products", "attention", "optimizer", "communication")
"""What is told apart of a step's kernels; all others are the rest."""
NAMED = 48
"""How many kinds of kernels of the rest are told apart."""
KNOWN = "fp8 known product: "
SCALED = "aten::_scaled_mm"
SIZES = 8
"""How many sizes of products are tried."""


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


def read_profile(events: list[TraceEvent]) -> dict[str, Any]:
    """Products, attention kernels, kernel times (ms) of the profiled step, and its waits for the GPU.

    Products of an evaluation inside the step are listed with that phase; its kernel times are left out, as they are
    from the timed blocks. A kernel belongs to the host range in which it was launched: the CUDA launch call with the
    kernel's correlation number lies inside that range, on the same thread. This holds for operators and for Transformer
    Engine's ranges.
    """
    kernels_of = kernel_finder(events)
    host = sorted((e for e in events if not e.gpu), key=lambda e: (e.start, -e.end))
    inside_of = inner_finder(host)
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
            continue
        if event.name.startswith(TE_RANGE):
            product = te_product(phase, event.name, longest(kernels_of(event)))
        elif event.name.startswith("aten::") and operator in OPERANDS and not wraps_scaled(event, inside_of(event)):
            product = _product_of_event(event, phase, operator, longest(kernels_of(event)))
        else:
            continue
        inside[event.thread] = event.end
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


def wraps_scaled(event: TraceEvent, inside: Sequence[TraceEvent]) -> bool:
    """Whether an operator computes its product by a ``_scaled_mm`` inside it. Uncompiled, torchao's tensors reach
    ``aten::mm`` as bfloat16, and their FP8 values are multiplied inside it."""
    return not event.name.startswith(SCALED) and any(each.name.startswith(SCALED) for each in inside)


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


def learn_families(products: list[Product]) -> dict[str, list[str]]:
    """Kind (``fp8`` or ``bfloat16``) -> the kernel families that ran products of this kind only.

    Runs ``torch.mm`` on BF16 and ``torch._scaled_mm`` on FP8 operands at up to :data:`SIZES` of the step's own sizes,
    and reads the kernels' names. Names change with cuBLAS, so none is written down.
    """
    import torch

    extents = sorted({(p.outer[0], p.inner, p.outer[1]) for p in products if min(p.inner, *p.outer) >= 64})
    chosen = extents[:: max(1, len(extents) // SIZES)][:SIZES]
    with torch.profiler.profile() as profiler:
        _run_known_products(chosen)
    events = plain_events(profiler)
    seen: dict[str, set[str]] = {FP8: set(), "bfloat16": set()}
    kernels_of = kernel_finder(events)
    for event in events:
        if not event.gpu and event.name.startswith(KNOWN) and (kernels := kernels_of(event)):
            seen[event.name.removeprefix(KNOWN)].add(kernel_family(longest(kernels)))
    return {kind: sorted(families - seen["bfloat16" if kind == FP8 else FP8]) for kind, families in seen.items()}


def _run_known_products(sizes: list[tuple[int, int, int]]) -> None:
    """Products of each size (m, k, n), each in a range named by its kind."""
    import torch

    device = "cuda"
    one = torch.ones((), device=device)
    for m, k, n in sizes:
        left, right = torch.randn(m, k, device=device).bfloat16(), torch.randn(n, k, device=device).bfloat16()
        with torch.profiler.record_function(KNOWN + "bfloat16"):
            left @ right.t()
        if m % 16 or k % 16 or n % 16:
            continue
        e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
        rows, columns = torch.ones(m, 1, device=device), torch.ones(1, n, device=device)
        for a_type, b_type, scales, fast in (
            (e4m3, e4m3, (one, one), False),
            (e5m2, e4m3, (one, one), False),
            (e4m3, e5m2, (one, one), False),
            (e4m3, e4m3, (rows, columns), True),
        ):
            a, b = left.to(a_type), right.to(b_type).t()
            with torch.profiler.record_function(KNOWN + FP8):
                torch._scaled_mm(a, b, *scales, out_dtype=torch.bfloat16, use_fast_accum=fast)
    torch.cuda.synchronize()
