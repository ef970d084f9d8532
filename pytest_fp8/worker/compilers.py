"""torch's own processes, in which an arm's Triton kernels are compiled: they start with its imports, not later."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Any

READY_SECONDS = 60
"""What their start may take. On two cores it took 12 s where Python keeps no bytecode of torch."""


def start() -> None:
    """Start them, and go on. torch would start them in the first compiled step. A pair whose code is compiled is
    built before they have their libraries, and they would work beside timed blocks. To compile in the arm itself takes
    longer: docs/findings.md, "What an arm's own work takes"."""
    # Where they cannot be had, or another release of torch names it otherwise, they start when something is compiled.
    with contextlib.suppress(Exception):
        from torch._inductor import async_compile

        async_compile.maybe_warm_pool()


def wait() -> float:
    """Until they wait for work themselves, if there are any, and :data:`READY_SECONDS` at most. Gives the seconds that
    this took."""
    start = time.perf_counter()
    # As in start(): without them the first compiled step waits for them, and no answer differs.
    with contextlib.suppress(Exception):
        while torchs := _with_pool():
            if torchs.AsyncCompile.use_process_pool() or time.perf_counter() - start > READY_SECONDS:
                break
            forget_ended()
            time.sleep(0.02)
    return time.perf_counter() - start


def forget_ended() -> None:
    """Let torch start others where theirs has ended: it would wait for its answers, since it keeps both ends of the
    pipe that they speak through."""
    # As in start(): where another release keeps them otherwise, torch itself reports what it cannot compile.
    with contextlib.suppress(Exception):
        if (torchs := _with_pool()) and any(pool.process.poll() is not None for pool in torchs._pool_set):
            torchs.after_fork()
            torchs.AsyncCompile._ready_future = None


def _with_pool() -> Any:
    """torch's module for compilation, where it has started processes."""
    torchs: Any = sys.modules.get("torch._inductor.async_compile")
    return torchs if getattr(torchs, "_pool_set", None) else None
