"""Kills a writer of baselines at one step after another and prints what a reader finds, as JSON lines.

``python -m helpers.crash_writer FOLDER``. Every attempt is a child of its own: it is forked, changes one step of the
writer so that its process dies there of SIGKILL, and writes. At a byte it dies of SIGXFSZ instead, which the kernel
sends where a file grows beyond the limit on its size. The parent then reads what the disk holds.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from helpers.baselines import baseline
from pytest_fp8.baselines import store
from pytest_fp8.baselines.atomic import updating
from pytest_fp8.errors import BaselineError, Fp8Error

OLD = baseline("tiny-case", "hash", metrics={"fp8_share": [0.5]}, reason="old")
NEW = baseline("tiny-case", "hash", metrics={"fp8_share": [0.75]}, reason="new")
OF_STREAM = ("write", "flush", "close")
"""Steps that are methods of the temporary file."""
STEPS = ("mkdir", "create", "write", "flush", "fsync", "fchmod", "close", "replace")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def patched(target: Any, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    setattr(target, name, around(getattr(target, name)))


def at(step: str, when: str, fault: Callable[[], None]) -> None:
    """Have ``fault`` happen before or after a step of the writer."""

    def around(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            if when == "before":
                fault()
            result = real(*args, **more)
            if when == "after":
                fault()
            return result

        return call

    if step in OF_STREAM:
        of_stream(step, around)
        return
    target, name = {
        "mkdir": (Path, "mkdir"),
        "create": (tempfile, "NamedTemporaryFile"),
    }.get(step, (os, step))
    patched(target, name, around)


class Stream:
    """The writer's temporary file, one of whose methods is changed. Its ``with`` block closes it by ``close``."""

    def __init__(self, file: Any, step: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self.file, self.name = file, file.name
        for name in ("write", "flush", "fileno", "close"):
            real = getattr(file, name)
            setattr(self, name, around(real) if name == step else real)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()  # type: ignore[attr-defined]


def of_stream(step: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    def create(real: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **more: Stream(real(*args, **more), step, around)

    patched(tempfile, "NamedTemporaryFile", create)


def no_room_after(count: int) -> None:
    """Let that many bytes reach the file, and no more of them."""

    def around(real: Callable[[bytes], int]) -> Callable[[bytes], int]:
        def write(data: bytes) -> int:
            real(data[:count])
            no_room()
            return count

        return write

    of_stream("write", around)


def no_room() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def as_nobody() -> None:
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)


def die_after(count: int) -> None:
    """Let that many bytes reach the file; the kernel kills the process that writes another."""
    # Python ignores this signal, and raises OSError instead.
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit_file_size(count)


def limit_file_size(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def attempts(length: int) -> Iterator[tuple[str, Callable[[], None], bool]]:
    """(name, what to change in the child, whether the folder is read-only meanwhile)."""
    for step in STEPS:
        for when in ("before", "after"):
            yield f"kill {when} {step}", lambda s=step, w=when: at(s, w, die), False
    for count in range(length):
        yield f"kill at byte {count}", lambda n=count: die_after(n), False
    for step in STEPS:
        yield f"full at {step}", lambda s=step: at(s, "before", no_room), False
    for count in range(0, length, 37):
        yield f"full at byte {count}", lambda n=count: no_room_after(n), False
        yield f"really full at byte {count}", lambda n=count: limit_file_size(n), False
    yield "read-only", as_nobody, True


def write_in_child(folder: Path, change: Callable[[], None]) -> tuple[int, str]:
    """Write the new baseline in a forked child; gives its wait status and the error it reported."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        said = ""
        try:
            change()
            store.write_baseline(folder, NEW)
        except BaselineError as error:
            said = error.message
        except BaseException as error:
            said = f"unexpected {type(error).__name__}: {error}"
        os.write(send, said.encode())
        os._exit(0)
    os.close(send)
    with os.fdopen(receive, "rb") as stream:
        said = stream.read().decode()
    return os.waitpid(child, 0)[1], said


def main(root: Path) -> None:
    length = len(json.dumps(NEW.to_json(), indent=1, sort_keys=True)) + 1
    for name, change, read_only in attempts(length):
        folder = Path(tempfile.mkdtemp(dir=root))
        folder.chmod(0o755)
        path = store.write_baseline(folder, OLD)
        if read_only:
            path.parent.chmod(0o555)
        status, said = write_in_child(folder, change)
        path.parent.chmod(0o755)
        try:
            found = store.read_baseline(folder, "h200", "tiny-case", "hash")
            content = found.newest.reason if found is not None else "no file"
            whole = found in (OLD, NEW)
        except Fp8Error as error:
            content, whole = error.message, False
        unfinished = [p for p in path.parent.iterdir() if p != path]
        hidden, size = [p.name for p in unfinished], sum(p.stat().st_size for p in unfinished)
        with updating(folder):
            store.write_baseline(folder, NEW)
        after = sorted(p.name for p in path.parent.iterdir())
        shutil.rmtree(folder)
        killed = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        row = {"attempt": name, "killed": killed, "said": said, "content": content, "whole": whole}
        print(json.dumps({**row, "hidden": hidden, "bytes left": size, "after the next update": after}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
