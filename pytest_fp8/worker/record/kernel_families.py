"""Learns which kernel families multiply FP8 and which BF16 on this GPU, from products of known precision."""

from __future__ import annotations

import torch

from pytest_fp8.questions.layers.kernels import kernel_family
from pytest_fp8.questions.layers.products import FP8, Product
from pytest_fp8.worker.record.profile import longest, plain_events, ranges_with_kernels

KNOWN = "fp8 known product: "
SIZES = 8
"""How many sizes of products are tried."""


def learn_families(products: list[Product]) -> dict[str, list[str]]:
    """Kind (``fp8`` or ``bfloat16``) -> the kernel families that ran products of this kind only.

    Runs ``torch.mm`` on BF16 and ``torch._scaled_mm`` on FP8 operands at up to :data:`SIZES` of the step's own sizes,
    and reads the kernels' names. Names change with cuBLAS, so none is written down.
    """
    extents = sorted({(p.outer[0], p.inner, p.outer[1]) for p in products if min(p.inner, *p.outer) >= 64})
    chosen = extents[:: max(1, len(extents) // SIZES)][:SIZES]
    with torch.profiler.profile() as profiler:
        _run_known_products(chosen)
    events = plain_events(profiler)
    seen: dict[str, set[str]] = {FP8: set(), "bfloat16": set()}
    for event, kernels in ranges_with_kernels(events, KNOWN):
        if kernels:
            seen[event.name.removeprefix(KNOWN)].add(kernel_family(longest(kernels)))
    return {kind: sorted(families - seen["bfloat16" if kind == FP8 else FP8]) for kind, families in seen.items()}


def _run_known_products(sizes: list[tuple[int, int, int]]) -> None:
    """Products of each size (m, k, n), each in a range named by its kind."""
    device = "cuda"
    one = torch.ones((), device=device)
    for m, k, n in sizes:
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
