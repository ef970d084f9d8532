"""Where the time of a session's arms goes: by arm, and what was waited for."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

BUILD = "build"
"""What is waited for while arms are built; all else answers a question."""


@dataclass
class Stopwatch:
    """Seconds since the session's first arm was started."""

    waited: dict[tuple[str, str], float] = field(default_factory=dict)
    """(arm, operation) -> seconds that were waited for it. Arms that are built at the same time share their wait."""
    tell: Callable[[str, str], contextlib.AbstractContextManager[None]] | None = None
    """Tells a person what is waited for, (arm, operation), while its block runs."""
    _began: float | None = None

    @contextlib.contextmanager
    def clock(self, arm: str, what: str) -> Iterator[None]:
        start = time.monotonic()
        if self._began is None:
            self._began = start
        try:
            with self.tell(arm, what) if self.tell is not None else contextlib.nullcontext():
                yield
        finally:
            key = arm, what
            self.waited[key] = self.waited.get(key, 0.0) + time.monotonic() - start

    @property
    def elapsed(self) -> float:
        """Seconds since the first arm was started, or since they were last taken; 0 where none was."""
        return time.monotonic() - self._began if self._began is not None else 0.0

    def take(self) -> dict[str, Any]:
        """``elapsed`` seconds since the last call, and ``waited`` by arm and operation; empty without a wait."""
        if not self.waited:
            return {}
        waited: dict[str, dict[str, float]] = {}
        for (arm, what), seconds in self.waited.items():
            waited.setdefault(arm, {})[what] = seconds
        taken = {"elapsed": self.elapsed, "waited": waited}
        self._began, self.waited = time.monotonic(), {}
        return taken
