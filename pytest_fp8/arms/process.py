"""One arm seen from pytest: a child process, asked over a socket, that never outlives its parent.

A message is one JSON document; raw numbers follow it as a second message of bytes. The arm's own output goes to a log
file, whose last lines are quoted in errors. Whatever goes wrong in an arm (an exception, no answer, no memory, a
signal) becomes one :class:`~pytest_fp8.errors.ArmError`. When an arm is closed, all processes that it started end.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from pytest_fp8.arms.asked import REQUEST_SECONDS, Asked
from pytest_fp8.arms.channel import Channel, Unreadable
from pytest_fp8.arms.env import arm_env
from pytest_fp8.arms.forked import ForkedProcess, can_fork
from pytest_fp8.arms.left_behind import end_processes_of
from pytest_fp8.arms.output import printable, tail_of
from pytest_fp8.arms.scratch import new_folder, remove
from pytest_fp8.arms.spec import ArmSpec
from pytest_fp8.codes import R
from pytest_fp8.errors import ArmError, first_line
from pytest_fp8.plain import to_plain

if TYPE_CHECKING:
    from pytest_fp8.arms.environment import ArmEnvironment

IMPORTED = "imported"
"""The file in a process's folder that it makes once its libraries are imported."""
UNKILLABLE_SECONDS = 30.0
COMPILES_NOTHING = {"TORCH_WARM_POOL": "0"}
"""Has torch start no processes for compilation ahead: an arm on the CPU has no kernels for them."""
CRASHED = "a library crashed; the output above says where, if it could"
SENT = "code in the arm or another program sent this signal"
ENDED_ITSELF = "code in the arm ended its process, as os._exit() does"
TRACEBACK = re.compile(r'^Traceback \(most recent call last|^ +File ".+", line \d+, in ', re.M)
"""What shows an exception in the end of an output, where a long one has lost its head."""
CAUSES: dict[int | None, str] = {
    1: "an exception outside of any question, as where a library cannot be imported; the output above ends with it",
    -signal.SIGSEGV: CRASHED,
    -signal.SIGABRT: CRASHED,
    -signal.SIGBUS: CRASHED,
    -signal.SIGFPE: CRASHED,
    -signal.SIGILL: CRASHED,
    None: "code in the arm closed its file descriptors, or became another program (os.exec)",
    -signal.SIGKILL: "the system's out-of-memory killer, or a kill -9",
    # What multiprocessing gives where nobody knows the code any more.
    255: f"{ENDED_ITSELF}; or the process that arms on the CPU are forked from was killed",
}
"""Of an arm's end, by its exit code; ``None`` while it runs."""


class ArmProcess(Asked):
    """One worker process. It starts by importing its backend's library; :meth:`build` then makes it one arm."""

    def __init__(
        self,
        backend: str = "bf16",
        environment: ArmEnvironment | None = None,
        fork: bool = False,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """``environment``: another interpreter or another checkout. Without it the arm runs as this process does, with
        its current variables, import path and folder.

        ``fork``: start it as a fork where that comes to the same. Never where there is a GPU: a process that has used
        CUDA cannot be forked.

        ``variables``: further ones, which no library reads while it is imported.
        """
        self.folder = new_folder("arm-")
        """Its log, and its own temporary files."""
        self.log = self.folder / "log"
        super().__init__()
        self._imported = False
        self._in = "in bfloat16"
        """What the arm's model is, in words."""
        self._side = f" ({environment.name})" if environment is not None else ""
        self._end: ArmError | None = None
        """What it ended with, where that was told."""
        self._connection, theirs = Pipe()
        # Ctrl-C may come while the fork server imports its libraries, which takes seconds.
        with contextlib.closing(theirs), open(self.log, "wb") as log, contextlib.ExitStack() as failed:
            failed.callback(remove, self.folder)
            env = arm_env(backend, self.folder, environment)
            self.temporary = env.get("TMPDIR", "")
            """Its folder for temporary files; empty where the variable is not set."""
            self._process: subprocess.Popen[bytes] | ForkedProcess
            if fork and environment is None and can_fork(env):
                self._process = ForkedProcess(theirs, self.log, backend, {**env, **(variables or {})})
            else:
                python = environment.python if environment is not None else sys.executable
                arguments = str(theirs.fileno()), str(os.getpid()), backend, str(self.folder / IMPORTED)
                self._process = subprocess.Popen(
                    [python, "-m", "pytest_fp8.worker.main", *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                    env={**env, **(variables or {})},
                )
            failed.pop_all()
        self._channel = Channel(self._connection, lambda: not self.alive)
        # Also runs at interpreter exit, so that a session that ends badly leaves no arm behind.
        self._finalizer = weakref.finalize(self, _end, self._process, self._connection, self.folder)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def pids(self) -> set[int]:
        return {self.pid}

    def fileno(self) -> int:
        """For :func:`multiprocessing.connection.wait`: ready when an answer is there, or the process is gone."""
        return self._connection.fileno()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def has_imported(self) -> bool:
        """Whether a process of its own, no fork, has its libraries: it imports nothing more until it is asked."""
        self._imported = self._imported or not self.alive or (self.folder / IMPORTED).exists()
        return self._imported

    def start_build(self, spec: ArmSpec) -> None:
        """Ask the process to become this arm; :meth:`receive` waits for it. Two arms can build at the same time."""
        self.name = spec.name + self._side
        self._in = f"in bfloat16 {'' if spec.case.recipe == 'none' else 'and converted to FP8 '}on {spec.device}"
        self.send("build", spec=to_plain(spec))

    def send(self, operation: str, **arguments: Any) -> None:
        """Send one request without waiting. Raises ``RuntimeError`` where the last request has no answer yet."""
        self._note_asked(operation)
        try:
            self._channel.ask(operation, arguments)
        except OSError:
            self._raise_dead()

    def receive(self, timeout: float = REQUEST_SECONDS) -> Any:
        """Wait ``timeout`` seconds for the answer to the last request: plain data or bytes. Raises :class:`ArmError`
        as :meth:`request` does."""
        try:
            answer = self._read(timeout)
        except BaseException:
            # Ctrl-C or a test's own time limit may end the wait. The late answer must not be read as the next one's.
            self.close()
            raise
        self._answer_due = False
        if "error" in answer:
            self._raise_error(answer)
        return answer["result"]

    def _read(self, timeout: float) -> dict[str, Any]:
        try:
            return self._channel.answer(timeout)
        except TimeoutError:
            self._raise_hung(timeout)
        except Unreadable as what:
            self._raise_unreadable(what)
        except (EOFError, OSError):
            self._raise_dead()

    def close(self) -> None:
        """End the process and everything it started. Safe to call twice."""
        self._finalizer()

    def tail(self) -> str:
        """The last lines of the arm's own output, or those with which its last stack begins."""
        return tail_of(self.log)

    # -- what went wrong ------------------------------------------------------------------------------------------

    def _raise_error(self, answer: dict[str, Any]) -> NoReturn:
        said = {key: printable(text) for key, text in answer.items() if isinstance(text, str)}
        cause, line = said["cause"], said["line"]
        out_of_memory = said["code"] == R.OUT_OF_MEMORY
        raise ArmError(
            R(said["code"]),
            f"the arm {self.name!r} ran out of GPU memory while it was asked to {self._asked!r}"
            if out_of_memory
            else f"{first_line(said['error'])}, in the arm {self.name!r} that was asked to {self._asked!r}",
            expected=f"to run in a process of its own, in the folder {os.getcwd()}, with the model {self._in}",
            # Where the trace is the cause, it already holds these lines.
            seen=said["error"] + (f"\n{line}" if cause and line else ""),
            cause=cause or said["trace"],
            next_step=said["next"] or f"run the lines of the trace by hand, with the model {self._in}",
        )

    def _raise_hung(self, timeout: float) -> NoReturn:
        # faulthandler in the worker writes every thread's stack to the log on SIGUSR1.
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGUSR1)
            time.sleep(0.5)
        tail = self.tail()
        self.close()
        self._end = ArmError(
            R.ARM_HUNG,
            f"the arm {self.name!r} gave no answer to {self._asked!r} in {timeout:.0f} s and was stopped",
            expected=f"an answer within {timeout:.0f} s",
            seen=f"the end of its output:\n{tail}",
            cause="a deadlock, or work far slower than planned; the stacks above say where it was",
            next_step="run the same case alone with -k, and watch nvidia-smi",
        )
        raise self._end from None

    def _raise_unreadable(self, what: Unreadable) -> NoReturn:
        tail = self.tail()
        self.close()
        self._end = ArmError(
            R.UNREADABLE_ANSWER,
            f"what the arm {self.name!r} gave to {self._asked!r} is no answer, and it was stopped",
            expected="one JSON document, with the number of the request",
            seen=f"{what}\nthe end of its output:\n{tail or '(nothing)'}",
            cause="code in the arm wrote to its socket: to every open file descriptor, or in a process that it forked",
            next_step="look for os.write, os.fdopen and os.fork in what the workload calls",
        )
        raise self._end from None

    def _raise_dead(self) -> NoReturn:
        # A broken connection is how the death was noticed, and says nothing more.
        raise self._ended(f"while it was asked to {self._asked!r}", "an answer") from None

    def death(self) -> ArmError:
        """The error of a process that has ended: the one that told of it, or that nothing was asked meanwhile."""
        return self._end or self._ended(
            f"after it was asked to {self._asked!r}, before the next request of the same question",
            "one process for all requests of a question: it keeps what they train",
        )

    def _ended(self, when: str, expected: str) -> ArmError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)
        code = self._process.returncode
        tail = self.tail()
        self.close()
        how = "closed its connection" if code is None else f"exited with {code}"
        if code is not None and code < 0:
            how = f"died of {_signal_name(-code)}"
        self._end = ArmError(
            R.ARM_DIED,
            f"the arm {self.name!r} {how} {when}",
            expected=expected,
            seen=f"the end of its output:\n{tail or '(nothing)'}",
            cause=_cause_of(code, tail),
            next_step="read the output above; `dmesg | tail` names a process the system killed",
        )
        return self._end


def _cause_of(code: int | None, tail: str) -> str:
    if code == 1 and not TRACEBACK.search(tail):
        # Python ends so where nothing catches an exception, and then shows it.
        return ENDED_ITSELF
    return CAUSES.get(code, SENT if code is not None and code < 0 else ENDED_ITSELF)


def _signal_name(number: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def _end(process: subprocess.Popen[bytes] | ForkedProcess, connection: Connection, folder: Path) -> None:
    # A worker whose connection closes ends by itself.
    connection.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=0.2)
    # The number of one that was waited for may be another's by now. What it started is found by its folder.
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        # One that a driver holds cannot be killed; then pytest must end all the same.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=UNKILLABLE_SECONDS)
    end_processes_of(folder)
    remove(folder)
