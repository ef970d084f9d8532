"""The one temporary folder of this process: its arms' logs, checkpoints and own temporary files.

It is made when the first arm needs it, and locked for as long as this process runs. It is removed at exit. What a
killed process left is removed by the next one that makes such a folder: its lock is free.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from multiprocessing.util import Finalize
from pathlib import Path

from pytest_fp8.arms.left_behind import end_processes_of

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
LONGEST_SOCKET = 107
"""Bytes of a Unix socket's path."""
SOCKET = "/pymp-12345678/listener-12345678"
"""How multiprocessing names one below a temporary folder."""
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
        folder, lock = _make(base)
        _made.append(folder)
        _end_at_exit(folder, lock)
    return _made[-1]


def made_again(folder: Path) -> None:
    """Make a folder of this process again that somebody has deleted, so that nobody sweeps it."""
    if not folder.is_dir():
        folder.mkdir(mode=0o700)
        with contextlib.suppress(OSError):
            _end_at_exit(folder, _locked(folder))


def _end_at_exit(folder: Path, lock: int | None) -> None:
    # After multiprocessing has removed its own folder in this one, and not in a fork of this process.
    Finalize(None, _end, args=(folder, lock), exitpriority=-200)


def sockets_fit(folder: Path) -> bool:
    """Whether multiprocessing can have its sockets below this folder."""
    return len(os.fsencode(folder)) + len(SOCKET) <= LONGEST_SOCKET


def _boot() -> str:
    """What begins the names of folders that were made since this machine was started: on a disk that several machines
    share, a lock may count on one of them only. Empty where that cannot be known."""
    with contextlib.suppress(OSError):
        return f"{BOOT_ID.read_text()[:4]}-"
    return ""


def _make(base: Path) -> tuple[Path, int | None]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"fp8-{_boot()}", dir=base))
        try:
            return folder, _locked(folder)
        except (BlockingIOError, FileNotFoundError):
            continue  # another process has swept it, before it was locked
        except OSError:
            return folder, None  # a file system without locks: nothing on it is swept


def _sweep(base: Path) -> None:
    """Remove the folders of processes that are gone, and end what their arms left running. Where the machine's
    boot id cannot be read a folder's name does not say whose it is, and nothing is removed."""
    boot = _boot()
    if not boot:
        return
    name = re.compile(f"fp8-{re.escape(boot)}[a-z0-9_]{{8}}")
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
