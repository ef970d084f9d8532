"""Arms forked from one process that has imported their libraries: how pytest sees them, and that process.

Where anything stands in the way, an arm starts as an interpreter of its own, which is only slower.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Mapping

from pytest_fp8.arms.template import PID, REAP, REFUSED, STATUS

FORK_SECONDS = 120.0
"""The first fork waits for the imports: seconds, or many of them on a machine that is busy."""
STATUS_SECONDS = 30.0
OF_EACH_TEST = "PYTEST_CURRENT_TEST"


class ForkedProcess:
    """An arm whose parent is the template: what :class:`subprocess.Popen` offers of one that is pytest's own child.

    The pid stays taken, even after the process has ended, until :meth:`reap`.
    """

    def __init__(self, pid: int, line: socket.socket) -> None:
        """``line``: to the template, about this process alone. Raises ``OSError`` where the kernel has no pidfd."""
        self.pid, self._line = pid, line
        self.returncode: int | None = None
        self._descriptor = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """The return code, as :class:`subprocess.Popen` has it; ``None`` while the process runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end, ``timeout`` in seconds. Raises :class:`subprocess.TimeoutExpired`."""
        if self.returncode is None:
            watch = select.poll()
            watch.register(self._descriptor, select.POLLIN)
            if not watch.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired("an arm", timeout or 0.0)
            self.returncode = self._status()
        return self.returncode

    def reap(self) -> None:
        """Wait for the end and give the pid back. Once only."""
        self.wait()
        os.close(self._descriptor)
        with contextlib.suppress(OSError):
            self._line.send(REAP)
            # The template closes its end when the process is gone.
            self._line.recv(1)
        self._line.close()

    def _status(self) -> int:
        with contextlib.suppress(OSError):
            self._line.send(STATUS)
            answer = self._line.recv(64)
            if answer:
                return int(answer)
        # The template is no longer there: the kernel ended the arm with it.
        return -signal.SIGKILL


class CannotFork(Exception):
    """Why this arm needs an interpreter of its own."""


class Template:
    """The process that a session's CPU arms are forked from, started when the first is wanted."""

    def __init__(self) -> None:
        self._refusal = "" if hasattr(os, "pidfd_open") else "this system has no pidfd_open"
        """Why nothing is forked any more."""
        self._variables: dict[str, str] = {}
        self._commands: socket.socket | None = None
        self._finalizer: weakref.finalize[..., Template] | None = None
        self.pid: int | None = None

    def fork(self, backend: str, variables: Mapping[str, str], requests: int, answers: int, log: int) -> ForkedProcess:
        """An arm's process with these environment variables and descriptors, which stay the caller's own.

        Raises :class:`CannotFork`; no process has the descriptors then.
        """
        if self._refusal:
            raise CannotFork(self._refusal)
        wanted = {name: value for name, value in variables.items() if name != OF_EACH_TEST}
        if self._commands is None:
            self._start(wanted)
        # Libraries read variables when they are imported: no fork can be given others.
        if wanted != self._variables:
            raise CannotFork("the environment variables or the import path are others than they were")
        order = {"backend": backend, "folder": _folder(), "test": variables.get(OF_EACH_TEST)}
        try:
            return self._ask(order, requests, answers, log)
        except (OSError, ValueError) as error:
            self._refusal = f"the process to fork from does not answer: {error}"
            # Whatever it was about to do, it does no more: the descriptors go to another process now.
            self.close()
            raise CannotFork(self._refusal) from error

    def close(self) -> None:
        """End the process, and with it every arm that was forked from it. Safe to call twice; none is started again."""
        self._refusal = self._refusal or "the process to fork from was closed"
        if self._finalizer is not None:
            self._finalizer()

    def _start(self, variables: dict[str, str]) -> None:
        self._commands, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "pytest_fp8.arms.template", str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env=variables,
            )
        self._variables, self.pid = variables, process.pid
        self._finalizer = weakref.finalize(self, _end, process, self._commands)

    def _ask(self, order: dict[str, str | None], requests: int, answers: int, log: int) -> ForkedProcess:
        """Raises :class:`CannotFork`, and ``OSError`` or ``ValueError`` where no answer comes that means anything."""
        assert self._commands is not None
        line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # An arm whose line is closed is ended by the template.
        with contextlib.ExitStack() as held:
            held.enter_context(line)
            line.settimeout(FORK_SECONDS)
            with theirs:
                socket.send_fds(self._commands, [json.dumps(order).encode()], [theirs.fileno(), requests, answers, log])
            answer = line.recv(1 << 12).decode()
            if not answer.startswith(PID):
                if not answer:
                    raise ConnectionError("it is gone")
                self._refusal = answer.removeprefix(REFUSED)
                raise CannotFork(self._refusal)
            line.settimeout(STATUS_SECONDS)
            process = ForkedProcess(int(answer.removeprefix(PID)), line)
            held.pop_all()
            return process


def _folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError as error:
        raise CannotFork("the current folder is gone") from error


def _end(process: subprocess.Popen[bytes], commands: socket.socket) -> None:
    commands.close()
    # It keeps nothing that would have to be put away.
    process.kill()
    process.wait()
