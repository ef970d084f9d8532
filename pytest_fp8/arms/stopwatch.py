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

    waited: dict[str, dict[str, float]] = field(default_factory=dict)
    """Arm -> operation -> seconds that were waited for it. Arms that are built at the same time share their wait."""
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
            spent = self.waited.setdefault(arm, {})
            spent[what] = spent.get(what, 0.0) + time.monotonic() - start

    def take(self) -> dict[str, Any]:
        """``elapsed`` seconds since the first arm was started or the last call, and those that were ``waited``; empty
        without a wait."""
        if self._began is None or not self.waited:
            return {}
        now = time.monotonic()
        taken = {"elapsed": now - self._began, "waited": self.waited}
        self._began, self.waited = now, {}
        return taken
