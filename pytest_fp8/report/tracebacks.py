"""How a failure is shown: at the user's line, without this package's frames below it, and what was found first."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

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
