"""What a session waits for, told while it waits: a line now and then, between those of pytest.

Tests run while pytest captures their output: what is told is written past the capture.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

APART_SECONDS = 20.0
"""From the beginning of a wait to its first line, and from one line to the next."""


class Progress:
    """Follows the tests of a session and the waits for their arms."""

    def __init__(self, write: Callable[[str], None]) -> None:
        """``write`` writes a line."""
        self._write, self._began = write, time.monotonic()
        self.test("", None)

    def test(self, case: str, question: str | None) -> None:
        """A test begins; what is waited for from now on is for it. ``case``: of a test without one its name."""
        self._what = f"{case} {question or ''}".strip()

    @contextlib.contextmanager
    def waiting(self, arm: str, what: str) -> Iterator[None]:
        """Tell of this wait while the block runs."""
        ended = threading.Event()
        # Only while this thread waits: nobody else writes then.
        teller = threading.Thread(target=self._tell, args=(arm, what, ended), daemon=True, name="fp8-progress")
        try:
            teller.start()
            yield
        finally:
            ended.set()
            if teller.is_alive():
                teller.join()

    def _tell(self, arm: str, what: str, ended: threading.Event) -> None:
        began = time.monotonic()
        # A terminal that is gone is no fault of the session: whoever writes there next will say so.
        with contextlib.suppress(OSError):
            while not ended.wait(APART_SECONDS):
                now = time.monotonic()
                minutes, seconds = divmod(int(now - self._began), 60)
                waited = f"{what.replace('_', ' ')} of {arm}, {now - began:.0f} s"
                self._write(f"fp8: {self._what}: {waited}; {minutes}:{seconds:02d} in all")


def follow(config: pytest.Config) -> Progress | None:
    """What tells the progress of this session's tests. ``None`` under ``-q``, and where this process has no terminal
    reporter or pytest-xdist's workers run the tests."""
    reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or config.getoption("verbose") < 0 or config.pluginmanager.has_plugin("dsession"):
        return None
    capture = config.pluginmanager.get_plugin("capturemanager")

    def write(line: str) -> None:
        with capture.global_and_fixture_disabled() if capture else contextlib.nullcontext():
            reporter.write_line(line)
            reporter.flush()

    return Progress(write)
