"""torch's own processes, in which an arm's Triton kernels are compiled: they start with its imports, not later."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

READY_SECONDS = 60
"""What their start may take. On two cores it took 12 s where Python keeps no bytecode of torch."""


def start() -> None:
    """Start them, and go on. torch would start them in the first compiled step. A pair whose code is compiled is
    built before they have their libraries, and they would work beside timed blocks, for 10 s on a host with two H100s.
    To compile in the arm itself takes longer: 25.7 s in place of 16.3 until 1B's first steps are done."""
    # Where they cannot be had, or another release of torch names it otherwise, they start when something is compiled.
    with contextlib.suppress(Exception):
        from torch._inductor import async_compile

        async_compile.maybe_warm_pool()


def wait() -> None:
    """Until they wait for work themselves, if there are any, and :data:`READY_SECONDS` at most."""
    torchs: Any = sys.modules.get("torch._inductor.async_compile")
    # As in start(): without them torch compiles in the arm, and no answer differs.
    with contextlib.suppress(Exception):
        # torch has no public name for "was a pool started?", and wait_pool_ready() would start one.
        if torchs._pool_set:
            torchs.AsyncCompile.wait_pool_ready(READY_SECONDS)
