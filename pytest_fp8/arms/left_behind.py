"""Ends what an arm started and what left its process group, such as a daemon with a session of its own."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

MARK = "PYTEST_FP8_ARM"
"""The variable that names an arm's folder to the arm and to what it starts."""
OUTPUTS = ("fd/1", "fd/2")
LOOKS = 3
"""A process may start another one while it is looked for."""


def end_processes_of(folder: Path) -> None:
    """Kill the processes of this user that an arm with its folder here has started, or that write to its log.

    A mark that nothing else sets: a shell in which somebody has looked at the folder names it too, in ``OLDPWD``.
    """
    for _ in range(LOOKS):
        found = [pid for pid in _own_processes() if _names(pid, str(folder))]
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if not found:
            return


def _own_processes() -> Iterator[int]:
    user, this = os.geteuid(), os.getpid()
    with os.scandir("/proc") as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if entry.name.isdecimal() and int(entry.name) != this and entry.stat().st_uid == user:
                    yield int(entry.name)


def _names(pid: int, folder: str) -> bool:
    with contextlib.suppress(OSError):
        mark = os.fsencode(f"{MARK}={folder}/")
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if any((variable + b"/").startswith(mark) for variable in variables):
            return True
    for output in OUTPUTS:
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{pid}/{output}").startswith(f"{folder}/"):
                return True
    return False
