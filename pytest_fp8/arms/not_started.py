"""What is told where the system lets no process of an arm start: no disk, no files, no processes."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator

from pytest_fp8.codes import R
from pytest_fp8.errors import ArmError

SCARCE: dict[int | None, str] = {
    errno.ENOSPC: "the disk of the temporary folder is full, or has no inodes left",
    errno.EDQUOT: "the user's quota on the disk of the temporary folder is used up",
    errno.EMFILE: "this process has too many files open; `ulimit -n` says how many it may",
    errno.ENFILE: "this machine has too many files open",
    errno.EAGAIN: "this user or container has too many processes; `ulimit -u` says how many a user may",
    errno.ENOMEM: "this machine or container has no memory left",
    errno.EACCES: "the temporary folder cannot be written",
    errno.EROFS: "the temporary folder cannot be written",
}
"""Why, by the system's error number."""


@contextlib.contextmanager
def told_as_arm_error(name: str) -> Iterator[None]:
    """An :class:`OSError` of the block, which starts the arm ``name``, becomes an :class:`ArmError`."""
    try:
        yield
    except OSError as error:
        place = tempfile.tempdir or os.environ.get("TMPDIR") or "/tmp"  # gettempdir() raises where none can be written
        raise ArmError(
            R.NOT_STARTED,
            f"the arm {name!r} could not be started: {error.strerror or error}",
            expected=f"room for another process, for its open files, and for a folder below {place}",
            seen=f"{type(error).__name__}: {error}",
            cause=SCARCE.get(error.errno, "the system refused; the line above says what"),
            next_step=f"df -h {place}; df -i {place}; ulimit -a; TMPDIR=FOLDER names another place",
        ) from None
