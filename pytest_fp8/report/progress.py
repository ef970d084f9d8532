"""What a session waits for, told while it waits: a live line on a terminal, a plain line now and then in a log.

Tests run while pytest captures their output: what is told is written past the capture.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pytest_fp8.arms.stopwatch import BUILD
from pytest_fp8.ci import ci_variable
from pytest_fp8.session_plan import in_words

if TYPE_CHECKING:
    import pytest

    from pytest_fp8.report.ledger import Ledger
    from pytest_fp8.session_plan import SessionPlan

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


class Progress:
    """Follows the tests of a session and the waits for their arms."""

    def __init__(self, display: LogLines, open_cases: Callable[[], Collection[str]]) -> None:
        """``open_cases``: those with tests that have not finished."""
        self._display, self._open_cases = display, open_cases
        self.plan: SessionPlan | None = None
        self.builds: Mapping[str, Sequence[Mapping[str, float]]] = {}
        """Seconds of each phase of each build so far, by arm."""
        self._case, self._question, self._arm = "", "", ""
        self._began: float | None = None
        self._case_began = self._stage_began = time.monotonic()
        self._took: dict[str, float] = {}
        """Seconds of each case before the one that runs."""
        self._stage: tuple[str, ...] = ()
        self._told = False

    def test(self, case: str, question: str | None) -> None:
        """A test begins; what is waited for from now on is for it. ``case``: of a test without one its name."""
        if case != self._case:
            now = time.monotonic()
            self._took[self._case] = self._took.get(self._case, 0.0) + now - self._case_began
            self._case_began = now
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
        """How much longer, at the pace of the cases so far: of this one, too, once it takes longer than planned."""
        if self.plan is None:
            return " in all"
        plan = self.plan.knowing({arm: builds[-1].get("second step", 0.0) for arm, builds in self.builds.items()})
        took = {**self._took}
        spent = took.pop(case, 0.0) + now - self._case_began
        late = 0 < plan.pace(took) * plan.of(case) < spent
        pace = plan.pace({**took, case: spent} if late else took)
        left = plan.left(self._open_cases(), case, spent, pace)
        if left < 1:
            return ", longer than planned"
        if late:
            return f", longer than planned; about {in_words(left)} for what follows"
        return f", about {in_words(left)} left"


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


def follow(config: pytest.Config, ledger: Ledger) -> Progress | None:
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
    return Progress(display, lambda: [case for case, tests in (ledger.open_tests or {}).items() if tests])
