"""Files written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shlex
import tempfile
from pathlib import Path

from pytest_fp8.codes import B
from pytest_fp8.errors import BaselineError


def write_atomically(path: Path, text: str) -> None:
    """Write ``text`` beside ``path``, flush it, rename it. A reader sees the old file or the new one. A writer that is
    killed leaves at most a hidden ``.*.tmp`` file beside it. Raises :class:`BaselineError`, which names the file."""
    temporary = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
        with open(handle, "wb") as stream:
            stream.write(text.encode())
            stream.flush()
            os.fsync(handle)
            os.fchmod(handle, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        # The system's own words alone: its error would name the hidden file, which is gone.
        reason, folder = error.strerror or str(error), shlex.quote(str(path.parent))
        raise BaselineError(
            B.NOT_WRITTEN,
            f"could not write {path}: {reason}",
            expected="room and permission to write there",
            seen=f"{reason}, when writing into {path.parent}",
            cause="the disk is full or the folder cannot be written; the earlier file is whole",
            next_step=f"df -h {folder}; ls -ld {folder}; then run the same command again",
        ) from error
