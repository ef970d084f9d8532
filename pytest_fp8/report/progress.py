"""What a session waits for, told while it waits: a live line on a terminal, a plain line now and then in a log.

Tests run while pytest captures their output, so both write to a copy of pytest's own output file.
"""

from __future__ import annotations

import contextlib
import io
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

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
Parts = tuple[str, str, str]
"""Of what is told: the case and its question, what is waited for, the times."""


class Display(Protocol):
    """Where progress is told."""

    def due(self, began: float, told: bool) -> float:
        """When to tell next of what began at ``began``; ``told``: whether it was told already."""

    def tell(self, parts: Parts) -> None: ...

    def clear(self) -> None:
        """The wait is over: leave nothing that pytest's next output would run into."""


class Progress:
    """Follows the tests of a session and the waits for their arms."""

    def __init__(self, display: Display, open_cases: Callable[[], Collection[str]]) -> None:
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


class LiveLine:
    """One line below pytest's current one, which pytest goes on writing: rich's own live display would take that one.
    It is there only while an arm is waited for."""

    def __init__(self, file: int, encoding: str, color: bool) -> None:
        self._file, self._encoding, self._color = file, encoding, color
        self._drawn = False
        self._last = 0.0

    def due(self, began: float, told: bool) -> float:
        if self._drawn:
            return self._last + TICK_SECONDS
        now = time.monotonic()
        return now if now - self._last < AT_ONCE_SECONDS else now + AT_ONCE_SECONDS

    def tell(self, parts: Parts) -> None:
        line = self._line(parts)
        self._drawn = True
        self._write(f"{BELOW}{line}{BACK}")

    def _line(self, parts: Parts) -> str:
        from rich.console import Console
        from rich.text import Text

        whose, what, times = parts
        text = Text.assemble(("fp8: ", "bold"), f"{whose}: ", (what, "bold"), (f"; {times}", "dim"))
        # One column less than there is: a full line would wrap.
        text.truncate((os.get_terminal_size(self._file).columns or 80) - 1, overflow="ellipsis")
        console = Console(file=io.StringIO(), force_terminal=True, color_system="standard" if self._color else None)
        with console.capture() as captured:
            console.print(text, end="", soft_wrap=True)
        return captured.get()

    def clear(self) -> None:
        if self._drawn:
            self._drawn = False
            with contextlib.suppress(OSError):
                self._write(CLEAR)

    def _write(self, text: str) -> None:
        os.write(self._file, text.encode(self._encoding, "replace"))
        self._last = time.monotonic()


class LogLines:
    """Whole lines between those of pytest, which begins its own line anew after them."""

    def __init__(self, file: int, encoding: str, reporter: Any) -> None:
        self._file, self._encoding, self._reporter = file, encoding, reporter
        self._last = time.monotonic() - APART_SECONDS

    def due(self, began: float, told: bool) -> float:
        latest = self._last + MOST_SECONDS
        return latest if told else min(latest, max(began + LASTS_SECONDS, self._last + APART_SECONDS))

    def tell(self, parts: Parts) -> None:
        whose, what, times = parts
        # As the reporter's own ensure_newline() does, which would write where tests' output is captured.
        begin, self._reporter.currentfspath = "\n" if self._reporter.currentfspath else "", None
        os.write(self._file, f"{begin}fp8: {whose}: {what}; {times}\n".encode(self._encoding, "replace"))
        self._last = time.monotonic()

    def clear(self) -> None:
        """What was written stays."""


def encoding_of(reporter: Any) -> str:
    """How what the reporter writes becomes bytes."""
    return getattr(reporter._tw._file, "encoding", None) or "utf-8"


def follow(config: pytest.Config, ledger: Ledger) -> Progress | None:
    """What tells the progress of this session's tests. ``None`` under ``-q``, and where this process has no terminal
    reporter or pytest-xdist's workers run the tests. To be called while output is not captured."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or config.getoption("verbose") < 0 or config.pluginmanager.has_plugin("dsession"):
        return None
    # pytest offers no public name for the file that its reporter writes to.
    output = reporter._tw._file
    try:
        file = os.dup(output.fileno())
    except (OSError, AttributeError):
        # Not a file of the system: in another program's hands, as in a test of pytest itself.
        return None
    config.add_cleanup(lambda: os.close(file))
    encoding = encoding_of(reporter)
    display: Display = LogLines(file, encoding, reporter)
    # Some CI systems run jobs in a pseudo-terminal and show what was written line by line.
    if os.isatty(file) and os.environ.get("TERM", "dumb") != "dumb" and not ci_variable(os.environ):
        display = LiveLine(file, encoding, reporter.hasmarkup)
    return Progress(display, lambda: [case for case, tests in (ledger.open_tests or {}).items() if tests])
