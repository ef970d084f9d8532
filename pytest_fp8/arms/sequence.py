"""Evidence that takes several requests: it is of one process of each arm, or it is none.

A curve trains an arm, and its checkpoint is saved afterwards: a process that was built in between has other weights.
So whatever gathers evidence notes which process of each arm answered it. Where that process ended by itself and another
one stands in its place, the gathering ends with the first one's death. What the pool closes is no death: a fresh
process for the timing, or room for the other arm.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, MutableMapping
from typing import Protocol
from weakref import WeakKeyDictionary

from pytest_fp8.errors import ArmError


class Process(Protocol):
    """An arm's process, as far as sequences need it."""

    def death(self) -> ArmError:
        """What it ended with. Only of a process that has ended."""

    def close(self) -> None: ...


Seen = MutableMapping[str, Process]
"""Arm -> the process that answered last."""


class Sequences:
    """The processes that each gathering of evidence has asked, and those that were lost."""

    def __init__(self) -> None:
        self._running = threading.local()
        self._lost: MutableMapping[Process, ArmError] = WeakKeyDictionary()

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """All requests inside the block belong together. A block inside another one is a part of it."""
        if self.current() is not None:
            yield
            return
        self._running.seen = {}
        try:
            yield
        finally:
            self._running.seen = None

    def current(self) -> Seen | None:
        """Of the gathering in this thread; ``None`` outside of any."""
        seen: Seen | None = getattr(self._running, "seen", None)
        return seen

    def lose(self, process: Process) -> None:
        """This process has ended by itself."""
        self._lost[process] = process.death()
        process.close()

    def note(self, seen: Seen | None, arm: str, process: Process, alone: bool) -> None:
        """This process is asked next. Raises :class:`ArmError` where the arm's last one was lost since.

        ``alone``: whether other arms are closed for this one, so that nothing relies on what they held.
        """
        if seen is None:
            return
        before = seen.get(arm)
        if before is not None and before is not process and before in self._lost:
            raise self._lost[before]
        if alone:
            seen.clear()
        seen[arm] = process
