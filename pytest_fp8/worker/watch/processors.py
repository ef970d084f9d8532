"""CPU contention while blocks are timed, from ``/proc``: hypervisor steal and run-queue waits."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

WORKING, STOLEN = (0, 1, 2, 5, 6), 7
"""Columns of the line ``cpu`` in ``/proc/stat``: user, nice, system, both interrupts; and steal. See proc(5)."""


class Reading(NamedTuple):
    """Seconds, each since some moment of its own."""

    wall: float
    used: float
    """In which the machine's processors worked; all of them together."""
    stolen: float
    """In which they had work, and the hypervisor ran other machines."""
    waited: float
    """In which threads of this process could have run, and other threads had their processor; all together."""


def read(proc: Path = Path("/proc")) -> Reading:
    """What Linux says now; zeros where it says nothing, as in some sandboxes."""
    ticks, waited = [0] * (STOLEN + 1), 0
    with contextlib.suppress(OSError, ValueError):
        ticks = [*map(int, (proc / "stat").read_text().partition("\n")[0].split()[1:]), *ticks]
    for thread in (proc / "self" / "task").glob("*/schedstat"):
        # Nanoseconds are the second number: Documentation/scheduler/sched-stats.rst of Linux. A thread may just end.
        with contextlib.suppress(OSError, ValueError, IndexError):
            waited += int(thread.read_text().split()[1])
    second = os.sysconf("SC_CLK_TCK")
    used = sum(ticks[column] for column in WORKING)
    return Reading(time.monotonic(), used / second, ticks[STOLEN] / second, waited / 1e9)


@contextmanager
def watched() -> Iterator[Callable[[], dict[str, float]]]:
    """A function that gives, once the block is over, the seconds it took and those of a :class:`Reading` in them."""
    found: dict[str, float] = {}
    before = read()
    yield lambda: found
    after = read()
    # A thread that ended meanwhile takes its waits along.
    found |= {name: max(0.0, getattr(after, name) - getattr(before, name)) for name in Reading._fields}
