"""The one temporary folder of this process: its arms' logs, checkpoints and own temporary files.

It is made when the first arm needs it, and locked for as long as this process runs. It is removed at exit. What a
killed process left, folders and processes that its arms had started, is ended by the next one that makes such a folder:
its lock is free.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import signal
import tempfile
import zlib
from collections.abc import Collection, Iterator
from multiprocessing.util import Finalize
from pathlib import Path

MARK = "PYTEST_FP8_ARM"
"""The variable that names an arm's folder to the arm and to what it starts."""
CHECKPOINTS = "checkpoints-"
LONGEST_SOCKET = 107
"""Bytes of a Unix socket's path."""
SOCKET = "/pymp-12345678/listener-12345678"
"""How multiprocessing names one below a temporary folder."""
OURS = f"fp8-{zlib.crc32(os.uname().nodename.encode()):08x}-"
"""How the folders of this host's processes begin: on a disk that several share, a lock may count on one of them
only."""
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


class Folders:
    """Private folders for the checkpoints of arms, by an arm and what it saves there: a reference shared by cases that
    save different things has several, so that none of them overwrites what another case still reads."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, str], Path] = {}

    def of(self, key: tuple[str, str]) -> Path:
        if key not in self._made:
            self._made[key] = new_folder(CHECKPOINTS)
        return self._made[key]

    def keep(self, arms: Collection[str]) -> list[tuple[str, str]]:
        """Delete the folders of all other arms; gives what they were."""
        gone = [key for key in self._made if key[0] not in arms]
        for key in gone:
            remove(self._made.pop(key))
        return gone


def session_folder() -> Path:
    """This process's folder: made when it is first asked for, or where somebody has deleted it meanwhile."""
    if not (_made and _made[-1].is_dir()):
        base = Path(tempfile.gettempdir()).absolute()
        _sweep(base)
        folder, lock = _make(base)
        _made.append(folder)
        # After multiprocessing has removed its own folder in this one, and not in a fork of this process.
        Finalize(None, _end, args=(folder, lock), exitpriority=-200)
    return _made[-1]


def sockets_fit(folder: Path) -> bool:
    """Whether multiprocessing can have its sockets below this folder."""
    return len(os.fsencode(folder)) + len(SOCKET) <= LONGEST_SOCKET


def _make(base: Path) -> tuple[Path, int | None]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=OURS, dir=base))
        try:
            return folder, _locked(folder)
        except (BlockingIOError, FileNotFoundError):
            continue  # another process has swept it, before it was locked
        except OSError:
            return folder, None  # a file system without locks: nothing on it is swept


def _sweep(base: Path) -> None:
    """Remove the folders of processes that are gone, and end what their arms left running."""
    name = re.compile(f"{OURS}[a-z0-9_]{{8}}")
    with os.scandir(base) as entries:
        found = [Path(entry) for entry in entries if name.fullmatch(entry.name)]
    for folder in found:
        with contextlib.suppress(OSError):
            lock = _locked(folder)
            end_processes_of(folder)
            _end(folder, lock)


def _locked(folder: Path) -> int:
    """Take the lock of a folder of this user's, which ends with this process at the latest; gives its file descriptor.

    Raises :class:`BlockingIOError` where another process has it, :class:`FileNotFoundError` where the folder is gone,
    and :class:`OSError` where it is a link, somebody else's, or cannot be locked.
    """
    # The folder itself is locked: systemd-tmpfiles then leaves it alone as well.
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        seen = os.fstat(lock)
        if not os.path.samestat(seen, folder.lstat()):
            raise FileNotFoundError(folder)
        if seen.st_uid != os.geteuid():
            raise PermissionError(folder)
    except BaseException:
        os.close(lock)
        raise
    return lock


def _end(folder: Path, lock: int | None) -> None:
    remove(folder)
    if lock is not None:
        os.close(lock)


def end_processes_of(folder: Path) -> None:
    """Kill the processes of this user that an arm with its folder here has started, or that write to its log: also
    those that left its process group, such as a daemon with a session of its own."""
    for _ in range(LOOKS):
        found = [pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if _is_of(pid, folder)]
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if not found:
            return


def _is_of(pid: int, folder: Path) -> bool:
    """A shell in which somebody has looked at the folder names it too, in ``OLDPWD``: the mark alone counts."""
    process = Path(f"/proc/{pid}")
    with contextlib.suppress(OSError):
        if pid == os.getpid() or process.stat().st_uid != os.geteuid():
            return False
        mark = os.fsencode(f"{MARK}={folder}/")
        if any((variable + b"/").startswith(mark) for variable in (process / "environ").read_bytes().split(b"\0")):
            return True
    for output in ("fd/1", "fd/2"):
        with contextlib.suppress(OSError):
            if os.readlink(process / output).startswith(f"{folder}/"):
                return True
    return False
