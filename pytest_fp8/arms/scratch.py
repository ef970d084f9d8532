"""The one temporary folder of this process: its arms' logs, checkpoints and own temporary files.

It is made when the first arm needs it, has the process's number in its name, and is removed at exit. What a killed
process left, folders and processes that its arms had started, is ended by the next one that makes such a folder.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import tempfile
import zlib
from collections.abc import Iterator
from multiprocessing.util import Finalize
from pathlib import Path

MARK = "PYTEST_FP8_ARM"
"""The variable that names an arm's folder to the arm and to what it starts."""
CHECKPOINTS = "checkpoints-"
LONGEST_SOCKET = 107
"""Bytes of a Unix socket's path."""
SOCKET = "/pymp-12345678/listener-12345678"
"""How multiprocessing names one below a temporary folder."""
OURS = f"fp8-{zlib.crc32((os.uname().nodename + os.readlink('/proc/self/ns/pid')).encode()):08x}-"
"""How the folders begin of processes whose numbers mean the same here: of this host, and of this container."""
LOOKS = 3
"""A process may start another one while it is looked for."""
_made: list[Path] = []
"""The folders of this process; the last one is in use."""


def new_folder(prefix: str) -> Path:
    """A new folder in this process's one. It goes with :func:`remove`, or with the process."""
    return Path(tempfile.mkdtemp(prefix=prefix, dir=session_folder()))


def remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """A new folder that is removed when the block is left."""
    folder = new_folder(prefix)
    try:
        yield folder
    finally:
        remove(folder)


def session_folder() -> Path:
    """This process's folder: made when it is first asked for, or where somebody has deleted it meanwhile."""
    if not (_made and _made[-1].is_dir()):
        base = Path(tempfile.gettempdir()).absolute()
        _sweep(base)
        _made.append(Path(tempfile.mkdtemp(prefix=f"{OURS}{os.getpid()}-", dir=base)))
        # After multiprocessing has removed its own folder in this one, and not in a fork of this process.
        Finalize(None, remove, args=(_made[-1],), exitpriority=-200)
    return _made[-1]


def sockets_fit(folder: Path) -> bool:
    """Whether multiprocessing can have its sockets below this folder."""
    return len(os.fsencode(folder)) + len(SOCKET) <= LONGEST_SOCKET


def _sweep(base: Path) -> None:
    """Remove the folders of processes that are gone, and end what their arms left running."""
    name = re.compile(rf"{OURS}(\d+)-[a-z0-9_]{{8}}")
    with os.scandir(base) as entries:
        found = {entry.path: name.fullmatch(entry.name) for entry in entries if entry.is_dir(follow_symlinks=False)}
    for folder in [Path(path) for path, match in found.items() if match and not Path(f"/proc/{match[1]}").exists()]:
        end_processes_of(folder)
        remove(folder)


def end_processes_of(folder: Path) -> None:
    """Kill the processes of this user that an arm with its folder here has started: also those that left its process
    group, such as a daemon with a session of its own."""
    for _ in range(LOOKS):
        found = [pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if _is_of(pid, folder)]
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if not found:
            return


def _is_of(pid: int, folder: Path) -> bool:
    """By the mark among its variables, or by its output, for a fork has the variables of the process that it came from.
    A shell in which somebody has looked at the folder names it too, in ``OLDPWD``."""
    if pid == os.getpid():
        return False
    process, mark = Path(f"/proc/{pid}"), os.fsencode(f"{MARK}={folder}/")
    # Other users' cannot be read.
    with contextlib.suppress(OSError):
        if any((each + b"/").startswith(mark) for each in (process / "environ").read_bytes().split(b"\0")):
            return True
        return any(os.readlink(process / output).startswith(f"{folder}/") for output in ("fd/1", "fd/2"))
    return False
