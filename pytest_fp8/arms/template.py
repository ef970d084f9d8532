"""The process that CPU arms are forked from: ``python -m pytest_fp8.arms.template COMMANDS PARENT``.

It imports once what arms import, and waits. Each message on the socket COMMANDS asks for one arm; a socket that comes
with it is that arm's own line. On it the arm says its pid, as its first word; then pytest asks here, which is where the
arm's parent is, how it ended, and has it reaped. Nobody else reaps: until pytest says so, a pid means one process.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from pytest_fp8.worker import main as worker

LONGEST = 1 << 16
"""Bytes of a message: a folder, a test's name and a few short words."""
PID, REFUSED = "pid ", "refused: "
STATUS, REAP = b"status", b"reap"
FORKS_WELL = ("jemalloc_bg_thd",)
"""Threads that take part in a fork by handlers of their own: jemalloc's comes with pyarrow, and so with pandas 3."""


@dataclass(frozen=True)
class Birth:
    """What a forked child is told to be."""

    backend: str
    folder: str
    """pytest's current folder."""
    test: str | None
    """PYTEST_CURRENT_TEST, the one variable that is another one for each arm."""
    line: socket.socket
    requests: int
    answers: int
    log: int


def main(arguments: list[str]) -> int:
    commands, parent = (int(value) for value in arguments)
    worker.die_with(parent)
    # A collection would write into pages that the children share.
    gc.disable()
    template = os.getpid()
    birth = serve(socket.socket(fileno=commands))
    if birth is None:
        return 0
    try:
        become(birth, template)
    except OSError as error:
        birth.line.send(f"{REFUSED}{error}".encode())
        return 1
    code = worker.serve(birth.requests, birth.answers, birth.backend)
    # To take apart what is shared with the template would copy it first: a quarter of a second for each arm.
    atexit._run_exitfuncs()
    os._exit(code)


def serve(commands: socket.socket) -> Birth | None:
    """Fork whenever asked to. Returns in each child, with what it is to be; here with ``None``, when pytest is gone."""
    children: dict[socket.socket, int] = {}
    while True:
        ready, _, _ = select.select([commands, *children], [], [])
        for line in [line for line in ready if line is not commands]:
            _answer(line, children)
        if commands not in ready:
            continue
        message, descriptors, _, _ = socket.recv_fds(commands, LONGEST, 4)
        if not message:
            for line in list(children):
                _reap(line, children)
            return None
        order = json.loads(message)
        line = socket.socket(fileno=descriptors[0])
        refusal = prepare(order["backend"])
        if refusal:
            with contextlib.suppress(OSError), line:
                line.send(f"{REFUSED}{refusal}".encode())
        else:
            pid = os.fork()
            if not pid:
                for other in [commands, *children]:
                    other.close()
                return Birth(**order, line=line, requests=descriptors[1], answers=descriptors[2], log=descriptors[3])
            children[line] = pid
        for descriptor in descriptors[1:]:
            os.close(descriptor)


def prepare(backend: str) -> str:
    """Import what an arm of this backend needs, in the first such arm's stead; the reason not to fork, if any."""
    worker.import_libraries(backend)
    import torch

    import pytest_fp8.worker.server  # noqa: F401

    if backend != "bf16":
        # torchao's conversion imports it, compiled or not: a third of a second.
        with contextlib.suppress(ImportError):
            import torch._inductor.codegen.triton
    gc.freeze()
    if torch.cuda.is_initialized():
        return "CUDA is initialised, and cannot be used in a fork"
    if threads() > 1:
        # OpenBLAS starts its threads when numpy is imported, ends them before any fork, and starts them anew when they
        # are next wanted, which here they are not. A thread that this leaves is of another kind.
        pid = os.fork()
        if not pid:
            os._exit(0)
        os.waitpid(pid, 0)
    return f"its template has {threads()} threads" if threads() > 1 else ""


def threads() -> int:
    """A thread that holds a lock at a fork holds it for ever in the child; :data:`FORKS_WELL` does not count."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it ended meanwhile
            names.append((task / "comm").read_text().strip())
    return sum(name not in FORKS_WELL for name in names)


def become(birth: Birth, template: int) -> None:
    """What :class:`subprocess.Popen` does for an arm that starts as a fresh interpreter."""
    os.setsid()
    worker.die_with(template)
    # What the template has left in its buffers is not this arm's to say.
    for stream in (sys.stdout, sys.stderr):
        os.dup2(birth.log, stream.fileno())
    os.close(birth.log)
    os.chdir(birth.folder)
    if not sys.flags.safe_path:
        sys.path[0] = birth.folder
    importlib.invalidate_caches()
    if birth.test is None:
        os.environ.pop("PYTEST_CURRENT_TEST", None)
    else:
        os.environ["PYTEST_CURRENT_TEST"] = birth.test
    # Python's own generator does this by itself, torch's starts from the same seed in each process.
    import numpy

    numpy.random.seed()
    birth.line.send(f"{PID}{os.getpid()}".encode())
    birth.line.close()


def _answer(line: socket.socket, children: dict[socket.socket, int]) -> None:
    """How a child ended, as ``Popen.returncode`` has it. It is asked after it has ended."""
    # An error is pytest's word, too: it no longer listens.
    with contextlib.suppress(OSError):
        if line.recv(LONGEST) == STATUS:
            ended = os.waitid(os.P_PID, children[line], os.WEXITED | os.WNOWAIT)
            assert ended is not None
            line.send(str(ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status).encode())
            return
    _reap(line, children)


def _reap(line: socket.socket, children: dict[socket.socket, int]) -> None:
    """Let a child go that pytest has ended, or that pytest no longer holds the line to."""
    pid = children.pop(line)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    # Its group is there from its first moments on; before that, it alone is.
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    line.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
