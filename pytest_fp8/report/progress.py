"""What a session waits for, told while it waits: a live line on a terminal, a plain line now and then in a log.

Tests run while pytest captures their output: what is told is written past the capture.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pytest_fp8.arms.stopwatch import BUILD
from pytest_fp8.ci import ci_variable

if TYPE_CHECKING:
    import pytest

    from pytest_fp8.report.record import Record

AT_ONCE_SECONDS = 0.25
"""A wait shorter than this shows no live line; a live line that is gone no longer than this comes back at once."""
TICK_SECONDS = 1.0
"""How often a live line is drawn anew."""
LASTS_SECONDS = 5.0
"""What takes so long has a line in a log."""
APART_SECONDS, MOST_SECONDS = 10.0, 60.0
"""Between two lines in a log, where there is something new to say, and where there is nothing new."""
BELOW = "\x1bD\x1b[A\x1b7\x1b[B\r\x1b[2K"
"""Go to the line below and empty it, scrolling where there is none. The position is saved."""
CLEAR = "\x1b7\x1b[B\r\x1b[2K\x1b8"
BACK = "\x1b8"
STDOUT = 1
"""Of the process, where a live line goes: pytest writes there, too."""
Parts = tuple[str, str, str]
"""Of what is told: the case and its question, what is waited for, the times."""
CACHE = "fp8/seconds"
"""In pytest's cache: GPU -> case -> seconds that its tests took when they last ran to their end."""


class Progress:
    """Follows the tests of a session and the waits for their arms."""

    def __init__(self, display: LogLines, open_cases: Callable[[], Collection[str]]) -> None:
        """``open_cases``: those with tests that have not finished."""
        self._display, self._open_cases = display, open_cases
        self.last: Mapping[str, float] = {}
        """Case -> seconds that it took when it last ran here."""
        self._case, self._question, self._arm = "", "", ""
        self._began: float | None = None
        self._case_began = self._stage_began = time.monotonic()
        self.took: dict[str, float] = {}
        """Seconds of each case before the one that runs."""
        self._stage: tuple[str, ...] = ()
        self._told = False

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

    def keep(self, config: pytest.Config, gpu: str, open_tests: Mapping[str, Collection[str]]) -> None:
        """Keep the seconds of each case whose tests came to their end. ``open_tests``: those that did not, by case."""
        self.test("", None)
        took = {case: round(seconds, 1) for case, seconds in self.took.items() if not open_tests.get(case, True)}
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
            self._display.clear()

    def _tell_until(self, ended: threading.Event) -> None:
        # A terminal that is gone is no fault of the session: whoever writes there next will say so.
        with contextlib.suppress(OSError):
            while not ended.wait(max(0.0, self._display.due(self._stage_began, self._told) - time.monotonic())):
                self._display.tell(self._parts(time.monotonic()))
                self._told = True

    def _parts(self, now: float) -> Parts:
        case, question, what, _ = self._stage
        whose = "the FP8 arm" if self._arm == case else self._arm
        minutes, seconds = divmod(int(now - (self._began or now)), 60)
        return (
            f"{case} {question}".strip(),
            f"{what.replace('_', ' ')} of {whose}, {in_words(int(now - self._stage_began))}",
            f"{minutes}:{seconds:02d}{self._left(case, now)}",
        )

    def _left(self, case: str, now: float) -> str:
        """How much longer, where it is known of each case that is not done."""
        spent = self.took.get(case, 0.0) + now - self._case_began
        waiting = {each: self.last.get(each) for each in self._open_cases()}
        if not waiting or None in waiting.values():
            return " in all"
        seconds = sum(max(0.0, last - spent * (each == case)) for each, last in waiting.items() if last is not None)
        return f", about {in_words(seconds)} left" if seconds >= 1 else ", longer than last time"


class LogLines:
    """Whole lines between those of pytest, which begins its own line anew after them."""

    def __init__(self, reporter: Any, past_capture: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        self._reporter, self._past_capture = reporter, past_capture
        self._last = time.monotonic() - APART_SECONDS

    def due(self, began: float, told: bool) -> float:
        """When to tell next of what began at ``began``; ``told``: whether it was told already."""
        latest = self._last + MOST_SECONDS
        return latest if told else min(latest, max(began + LASTS_SECONDS, self._last + APART_SECONDS))

    def tell(self, parts: Parts) -> None:
        with self._past_capture():
            self._write("fp8: {}: {}; {}".format(*parts))
        self._last = time.monotonic()

    def _write(self, line: str) -> None:
        self._reporter.write_line(line)
        self._reporter.flush()

    def clear(self) -> None:
        """The wait is over: leave nothing that pytest's next output would run into."""


class LiveLine(LogLines):
    """One line below pytest's current one, which pytest goes on writing, while an arm is waited for."""

    _drawn = False

    def due(self, began: float, told: bool) -> float:
        if self._drawn:
            return self._last + TICK_SECONDS
        now = time.monotonic()
        return now if now - self._last < AT_ONCE_SECONDS else now + AT_ONCE_SECONDS

    def _write(self, line: str) -> None:
        # One column less than there is: a full line would wrap.
        room = (os.get_terminal_size(STDOUT).columns or 80) - 1
        self._drawn = True
        self._draw(f"{BELOW}{line if len(line) <= room else f'{line[: room - 1]}…'}{BACK}")

    def clear(self) -> None:
        if self._drawn:
            self._drawn = False
            with contextlib.suppress(OSError), self._past_capture():
                self._draw(CLEAR)
            self._last = time.monotonic()

    def _draw(self, text: str) -> None:
        # Not by the reporter, which counts the columns of its own line.
        os.write(STDOUT, text.encode(encoding_of(self._reporter), "replace"))


def encoding_of(reporter: Any) -> str:
    """How what the reporter writes becomes bytes. pytest offers no public name for its file."""
    return getattr(reporter._tw._file, "encoding", None) or "utf-8"


def follow(config: pytest.Config, record: Record) -> Progress | None:
    """What tells the progress of this session's tests. ``None`` under ``-q``, and where this process has no terminal
    reporter or pytest-xdist's workers run the tests."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or config.getoption("verbose") < 0 or config.pluginmanager.has_plugin("dsession"):
        return None
    # Some CI systems run jobs in a pseudo-terminal and show what was written line by line.
    # isatty is a boolean in pytest 8, and in 9 one that can be called.
    live = bool(reporter.isatty) and os.environ.get("TERM", "dumb") != "dumb" and not ci_variable(os.environ)
    capture = config.pluginmanager.get_plugin("capturemanager")
    past_capture = capture.global_and_fixture_disabled if capture else contextlib.nullcontext
    display = (LiveLine if live else LogLines)(reporter, past_capture)
    return Progress(display, lambda: record.open_tests)


def in_words(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
