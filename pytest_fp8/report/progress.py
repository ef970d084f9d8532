"""What a session waits for, told while it waits: a line now and then, between those of pytest.

Tests run while pytest captures their output: what is told is written past the capture.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from pytest_fp8.arms.stopwatch import BUILD

if TYPE_CHECKING:
    import pytest

LASTS_SECONDS = 5.0
"""What takes so long has a line."""
APART_SECONDS, MOST_SECONDS = 10.0, 60.0
"""Between two lines, where there is something new to say, and where there is nothing new."""


class Progress:
    """Follows the tests of a session and the waits for their arms."""

    def __init__(self, write: Callable[[str], None]) -> None:
        """``write`` writes a line."""
        self._write = write
        self._case, self._question, self._arm = "", "", ""
        self._began: float | None = None
        self._stage_began = time.monotonic()
        self._stage: tuple[str, ...] = ()
        self._told = False
        self._last_line = time.monotonic() - APART_SECONDS

    def test(self, case: str, question: str | None) -> None:
        """A test begins; what is waited for from now on is for it. ``case``: of a test without one its name."""
        self._case, self._question = case, question or ""

    @contextlib.contextmanager
    def waiting(self, arm: str, what: str) -> Iterator[None]:
        """Tell of this wait while the block runs."""
        # Arms that answer the same by turns do one thing; each build is one of its own.
        stage = self._case, self._question, what, arm if what == BUILD else ""
        self._began = self._began or time.monotonic()
        if stage != self._stage:
            self._stage, self._stage_began, self._told = stage, time.monotonic(), False
        self._arm = arm
        ended = threading.Event()
        # Only while this thread waits: nobody else writes then.
        teller = threading.Thread(target=self._tell_until, args=(ended,), daemon=True, name="fp8-progress")
        try:
            teller.start()
            yield
        finally:
            ended.set()
            if teller.is_alive():
                teller.join()

    def _tell_until(self, ended: threading.Event) -> None:
        # A terminal that is gone is no fault of the session: whoever writes there next will say so.
        with contextlib.suppress(OSError):
            while not ended.wait(max(0.0, self.due() - time.monotonic())):
                self._write(self._line(time.monotonic()))
                self._told, self._last_line = True, time.monotonic()

    def due(self) -> float:
        """When to tell next."""
        latest = self._last_line + MOST_SECONDS
        soonest = max(self._stage_began + LASTS_SECONDS, self._last_line + APART_SECONDS)
        return latest if self._told else min(latest, soonest)

    def _line(self, now: float) -> str:
        case, question, what, _ = self._stage
        whose = "the FP8 arm" if self._arm == case else self._arm
        minutes, seconds = divmod(int(now - (self._began or now)), 60)
        waited = f"{what.replace('_', ' ')} of {whose}, {in_words(int(now - self._stage_began))}"
        return f"fp8: {f'{case} {question}'.strip()}: {waited}; {minutes}:{seconds:02d} in all"


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


def in_words(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
