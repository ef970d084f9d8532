"""Ends what an arm started and what left its process group, such as a daemon with a session of its own."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

OUTPUTS = ("fd/1", "fd/2")
LOOKS = 3
"""A process may start another one while it is looked for."""


def end_processes_of(folder: Path) -> None:
    """Kill the processes of this user whose environment or output names this folder: an arm's temporary files and its
    log lie there, and children inherit both."""
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
        if os.fsencode(folder) in Path(f"/proc/{pid}/environ").read_bytes():
            return True
    for output in OUTPUTS:
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{pid}/{output}").startswith(f"{folder}/"):
                return True
    return False
