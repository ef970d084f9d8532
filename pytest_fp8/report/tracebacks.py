"""How a failure is shown: at the user's line, without this package's frames below it, and what was found first."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

OURS = str(Path(__file__).parents[1])
RUNNERS = ("_pytest", "pluggy")


def end_at_the_users_line(trace: TracebackType | None) -> None:
    """Cut the frames of this package off the end of a traceback, in place, and those of code without a file, as a data
    class's __init__. One without a user's line stays whole."""
    last = None
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith((OURS, "<")):
            last = None if any(f"/{name}/" in file for name in RUNNERS) else trace
        trace = trace.tb_next
    if last is not None:
        last.tb_next = None


def headline_first(report: Any, error: BaseException) -> None:
    """The closing FAILED line begins with what was found: the class of the error would push it off the line."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        crash.message = str(error)


def fold(reporter: pytest.TerminalReporter | None) -> None:
    """On a terminal: fold the messages of failed FP8 tests to its width, in place, each line below what its label says.
    Lines of the user's source stay as they are."""
    if reporter is None or not reporter.isatty:
        return
    from pytest_fp8.report.footnotes import folded

    width = shutil.get_terminal_size().columns - 1
    for report in (*reporter.stats.get("failed", ()), *reporter.stats.get("error", ())):
        if getattr(report, "about_fp8", False):
            for shown in getattr(getattr(report.longrepr, "reprtraceback", None), "reprentries", ()):
                lines = (["E" + x for x in folded(y[1:], width)] if y[:2] == "E " else [y] for y in shown.lines)
                shown.lines = [part for parts in lines for part in parts]
