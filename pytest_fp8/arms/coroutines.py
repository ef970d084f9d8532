"""Functions that can be suspended inside ordinary calls: each runs in a thread of its own, and only one at a time.

Questions ask their arms by plain calls. With generators each function between a question and its arm would be one too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

NAME = "fp8-question"
"""Of the threads."""
END_SECONDS = 10.0
"""How long a function that was cancelled may go on computing before it is left to itself, as a daemon."""

_running = threading.local()


class Cancelled(BaseException):
    """Raised where a function is suspended that is not to go on."""


class Coroutine:
    """A function that has not begun, is suspended, or has ended. Its caller waits while it runs."""

    def __init__(self, function: Callable[[], object]) -> None:
        self.wanted: Any = None
        """What it was suspended with."""
        self.ended = False
        self.error: BaseException | None = None
        """What it ended in."""
        self._function = function
        self._thread: threading.Thread | None = None
        self._cancelled = False
        self._given: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self._stopped: SimpleQueue[None] = SimpleQueue()

    def resume(self, value: Any = None, error: BaseException | None = None) -> None:
        """Let it begin or go on until it is suspended or ends: :func:`suspend` gives ``value`` or raises ``error``."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True, name=NAME)
            self._thread.start()
        else:
            self._given.put((value, error))
        self._stopped.get()

    def close(self) -> None:
        """End it where it is suspended, or at its next suspension where it still runs after an interrupt."""
        if self._thread is None or self.ended:
            return
        self._cancelled = True
        self._given.put((None, Cancelled()))
        self._thread.join(END_SECONDS)

    def _run(self) -> None:
        _running.coroutine = self
        try:
            self._function()
        except BaseException as error:
            self.error = error
        self.ended = True
        self._stopped.put(None)

    def suspended(self, wanted: Any) -> Any:
        if self._cancelled:
            raise Cancelled
        self.wanted = wanted
        self._stopped.put(None)
        value, error = self._given.get()
        self.wanted = None
        if error is not None:
            raise error
        return value


def current() -> Coroutine | None:
    """The coroutine that this is called in."""
    return getattr(_running, "coroutine", None)


def suspend(wanted: Any) -> Any:
    """Called in a coroutine: wait until it is resumed, and give what it is resumed with."""
    coroutine = current()
    assert coroutine is not None, "called outside of coroutines"
    return coroutine.suspended(wanted)
