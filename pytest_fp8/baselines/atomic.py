"""Files written whole or not at all, and the lock that lets one run at a time update a folder of baselines."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pytest_fp8.codes import B
from pytest_fp8.errors import BaselineError

LOCK = ".lock"


def write_atomically(path: Path, text: str) -> None:
    """Write ``text`` beside ``path``, flush it, rename it. A reader sees the old file or the new one. A writer that is
    killed leaves at most a hidden ``.*.tmp`` file beside it. Raises :class:`BaselineError`, which names the file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    except OSError as error:
        raise _not_written(path, error) from error
    try:
        with open(handle, "wb") as stream:
            stream.write(text.encode())
            stream.flush()
            os.fsync(handle)
            os.fchmod(handle, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise _not_written(path, error) from error


@contextmanager
def updating(folder: Path) -> Iterator[None]:
    """Hold the folder's update lock; raises :class:`BaselineError` at once where another run holds it. The operating
    system gives the lock of a dead run back."""
    path = folder / LOCK
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = path.open("a")
    except OSError as error:
        raise _not_written(path, error) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise BaselineError(
                B.LOCKED,
                f"another run is updating the baselines in {folder}",
                expected="one update at a time",
                seen=f"{path}: {error.strerror}",
                cause="pytest --fp8-update on this folder",
                next_step="wait for it to end, then run again; one run with -n 2 uses two GPUs of a host",
            ) from error
        try:
            yield
        finally:
            # A process that was forked meanwhile has the file open, too.
            fcntl.flock(lock, fcntl.LOCK_UN)


def _not_written(path: Path, error: OSError) -> BaselineError:
    # The system's own words alone: its error would name the hidden file, which is gone.
    reason, folder = error.strerror or str(error), shlex.quote(str(path.parent))
    return BaselineError(
        B.NOT_WRITTEN,
        f"could not write {path}: {reason}",
        expected="room and permission to write there",
        seen=f"{reason}, when writing into {path.parent}",
        cause="the disk is full, the folder cannot be written or a part of its path is no folder; nothing was "
        "changed, the earlier file is whole",
        next_step=f"df -h {folder}; ls -ld {folder}; then run the same command again",
    )
