"""What a session waits for, told while it waits: a line now and then, between those of pytest.

Tests run while pytest captures their output: what is told is written past the capture.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pytest_fp8.arms.stopwatch import BUILD

if TYPE_CHECKING:
    import pytest

    from pytest_fp8.report.record import Record

LASTS_SECONDS = 5.0
"""What takes so long has a line."""
APART_SECONDS, MOST_SECONDS = 10.0, 60.0
"""Between two lines, where there is something new to say, and where there is nothing new."""
CACHE = "fp8/seconds"
"""In pytest's cache: GPU -> case -> seconds that its tests took when they last ran to their end."""


class Progress:
    """Follows the tests of a session and the waits for their arms."""

    def __init__(self, write: Callable[[str], None], open_cases: Callable[[], Collection[str]]) -> None:
        """``write`` writes a line. ``open_cases``: those with tests that have not finished."""
        self._write, self._open_cases = write, open_cases
        self.last: Mapping[str, float] = {}
        """Case -> seconds that it took when it last ran here."""
        self.took: dict[str, float] = {}
        """Seconds of each case before the one that runs."""
        self._case, self._question, self._arm = "", "", ""
        self._began: float | None = None
        self._case_began = self._stage_began = time.monotonic()
        self._stage: tuple[str, ...] = ()
        self._told = False
        self._last_line = time.monotonic() - APART_SECONDS

    def test(self, case: str, question: str | None) -> None:
        """A test begins; what is waited for from now on is for it. ``case``: of a test without one its name."""
        if case != self._case:
            now = time.monotonic()
            self.took[self._case] = self.took.get(self._case, 0.0) + now - self._case_began
            self._case_began = now
        self._case, self._question = case, question or ""

    def recall(self, config: pytest.Config, gpu: str) -> None:
        """Take what :meth:`keep` has kept for this GPU: its folder of baselines."""
        cache = getattr(config, "cache", None)
        self.last = cache.get(CACHE, {}).get(gpu, {}) if cache is not None else {}

    def keep(self, config: pytest.Config, gpu: str, done: Collection[str]) -> None:
        """Keep the seconds of each case that is ``done``: its tests came to their end."""
        self.test("", None)
        took = {case: round(seconds, 1) for case, seconds in self.took.items() if case in done}
        cache = getattr(config, "cache", None)
        if took and cache is not None:
            cache.set(CACHE, {**cache.get(CACHE, {}), gpu: {**self.last, **took}})

    def planned(self, cases: Collection[str]) -> list[str]:
        """One line on how long these cases took when they last ran; none where that is known of no case."""
        known = [self.last[case] for case in cases if case in self.last]
        if not known:
            return []
        new = f"; {len(cases) - len(known)} case(s) did not run here before" if len(known) < len(cases) else ""
        return [f"fp8: {len(known)} case(s) took {in_words(sum(known))} last time{new}"]

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
        return f"fp8: {f'{case} {question}'.strip()}: {waited}; {minutes}:{seconds:02d}{self._left(case, now)}"

    def _left(self, case: str, now: float) -> str:
        """How much longer, where it is known of each case that is not done."""
        spent = self.took.get(case, 0.0) + now - self._case_began
        waiting = {each: self.last.get(each) for each in self._open_cases()}
        if not waiting or None in waiting.values():
            return " in all"
        seconds = sum(max(0.0, last - spent * (each == case)) for each, last in waiting.items() if last is not None)
        return f", about {in_words(seconds)} left" if seconds >= 1 else ", longer than last time"


def follow(config: pytest.Config, record: Record) -> Progress | None:
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

    return Progress(write, lambda: record.open_tests)


def in_words(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
