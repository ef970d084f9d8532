"""torch's own processes, in which an arm's Triton kernels are compiled: they start with its imports, not later."""

from __future__ import annotations

import contextlib
import sys
import time

from pytest_fp8.bytecode import kept_by_children

READY_SECONDS = 60
"""What their start may take. On hosts with H100s it took 12 s."""


def start() -> None:
    """Start them, and go on. torch would start them in the first compiled step. A pair whose code is compiled is
    built before they have their libraries: on two hosts with H100s four of them worked for 10 s beside timed blocks.

    To compile in the arm itself instead takes longer: 25.7 and 44.2 s for the first steps of torchao's tensorwise and
    rowwise arms at 1B on H100s with cold caches, where these took 16.3 and 21.9 s."""
    # Where they cannot be had, or another release of torch names it otherwise, they start when something is compiled.
    with contextlib.suppress(Exception), kept_by_children():
        from torch._inductor import async_compile

        async_compile.maybe_warm_pool()


def wait() -> float:
    """Until they wait for work themselves, if there are any. Gives the seconds that this took."""
    start = time.perf_counter()
    if (async_compile := sys.modules.get("torch._inductor.async_compile")) is not None:
        # Where they cannot be had, torch compiles in the process itself, and says so where it must.
        with contextlib.suppress(Exception):
            if async_compile._pool_set:
                async_compile.AsyncCompile.wait_pool_ready(READY_SECONDS)
    return time.perf_counter() - start
