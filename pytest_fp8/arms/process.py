"""One arm seen from pytest: a child process for each of its ranks, asked over sockets, that never outlives its parent.

A message is one JSON document; raw numbers follow it as a second message of bytes. Code of the user runs in the arm
and can write to any file descriptor, fork, or end the process while a child of it keeps the socket open. Whatever goes
wrong there (an exception, no answer, garbage, no memory, a signal) becomes one :class:`~pytest_fp8.errors.ArmError`,
which quotes the last lines of the process's output. When an arm is closed, all processes that it started end.

An arm of several ranks is asked the same on each, and answers as one (:mod:`pytest_fp8.arms.merging`). Its processes
have torchrun's variables and meet through a file. They are no children of torchrun: a fork of what has its libraries is
there in 0.04 s, and torchrun's two ranks have met after 15 s. What goes wrong on one rank is the arm's: all ranks end,
and the error names the one that began.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from pytest_fp8.arms.environment import ArmEnvironment, arm_env
from pytest_fp8.arms.forked import ForkedProcess, can_fork
from pytest_fp8.arms.merging import RanksDisagree, merged
from pytest_fp8.arms.scratch import end_processes_of, new_folder, remove
from pytest_fp8.arms.spec import STORE, ArmSpec
from pytest_fp8.codes import R
from pytest_fp8.errors import ArmError, first_line
from pytest_fp8.plain import to_plain

BUILD_SECONDS = 420.0
REQUEST_SECONDS = 300.0
GRACE_SECONDS = 5.0
"""How long the other ranks may still answer after one has failed. They may wait for it in a collective for minutes."""
UNKILLABLE_SECONDS = 30.0
LOOK_SECONDS = 0.2
"""How often it is seen whether a process is still there."""
SILENCE_SECONDS = 10
"""How long an answer that has begun may stand still."""
MOST_BYTES = 2**30
"""Of one answer: what a user's own function gives back is the largest."""
LOG_LINES, LOG_BYTES = 25, 2**18
"""How much of an arm's output is shown, and how much of its end is read for that."""
STACK = re.compile("Fatal Python error|(Current t|T)hread 0x")
UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""What a terminal obeys, and what no encoding can write."""
CONSEQUENCE = re.compile(r"closed by peer|reset by peer|Broken pipe|gloo|NCCL|DistBackendError|DistNetworkError", re.I)
"""What a rank says whose partner has failed."""
OTHER_COLLECTIVES = re.compile(r"collective mismatch|Received data size doesn't match|op\.preamble\.length", re.I)
"""What gloo says of ranks whose calls do not fit together, before it ends one of them."""
ON_THE_CPU = {"TORCH_WARM_POOL": "0", "DS_ACCELERATOR": "cpu"}
"""torch starts no processes for compilation ahead, as there are no kernels for them; DeepSpeed takes no GPU."""


class Rank:
    """One process of an arm: its socket, its log, its folder."""

    def __init__(
        self, backend: str, environment: ArmEnvironment | None, fork: bool, variables: Mapping[str, str]
    ) -> None:
        """``variables``: further ones, which no library reads while it is imported."""
        self.folder = new_folder("arm-")
        """Its log, and its own temporary files."""
        self.log = self.folder / "log"
        connection, theirs = Pipe()
        # Ctrl-C may come while the fork server imports its libraries, which takes seconds.
        with contextlib.closing(theirs), open(self.log, "wb") as log, contextlib.ExitStack() as failed:
            failed.callback(remove, self.folder)
            env = arm_env(backend, self.folder, environment)
            self.temporary = env.get("TMPDIR", "")
            """Its folder for temporary files; empty where the variable is not set."""
            given = {STORE: str(self.folder / "store"), **env, **variables}
            self._process: subprocess.Popen[bytes] | ForkedProcess
            if fork and environment is None and can_fork(env):
                self._process = ForkedProcess(theirs, self.log, backend, given)
            else:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "pytest_fp8.worker.main", str(theirs.fileno()), str(os.getpid()), backend],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                    env=given,
                )
            failed.pop_all()
        self.pid: int = self._process.pid
        self._talk_over(connection)
        # Also runs at interpreter exit, so that a session that ends badly leaves no arm behind. Safe to call twice.
        self.close: Callable[[], object] = weakref.finalize(
            self, end_of_process, self._process, connection, self.folder
        )

    def _talk_over(self, connection: Connection) -> None:
        self.connection, self._number = connection, 0
        with socket.socket(fileno=os.dup(connection.fileno())) as ours:
            ours.setblocking(True)  # whatever socket.setdefaulttimeout() was given
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", SILENCE_SECONDS, 0))

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def exit_code(self) -> int | None:
        """As :attr:`subprocess.Popen.returncode`, which takes a moment to be known; ``None``: it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)
        return self._process.returncode

    def ask(self, operation: str, arguments: dict[str, Any]) -> None:
        self._number += 1
        request = {"id": self._number, "operation": operation, "arguments": arguments}
        self.connection.send_bytes(json.dumps(request).encode())

    def answer(self) -> dict[str, Any]:
        """The answer to the last request, which has begun to arrive. Raises :class:`EOFError` where none can come any
        more, :class:`OSError`, :class:`ValueError` and :class:`LookupError` for what is no answer to it."""
        if not self.connection.poll(0):
            # It has ended, and a child of it may keep the socket open.
            raise EOFError
        answer: dict[str, Any] = json.loads(self.connection.recv_bytes(MOST_BYTES))
        if answer["id"] != self._number:
            raise ValueError(f"an answer to request {answer['id']}")
        if "bytes" in answer:
            answer["result"] = self.connection.recv_bytes(MOST_BYTES)
        return answer

    def show_stacks(self) -> None:
        """Have faulthandler in the worker write every thread's stack to the log."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)


class ArmProcess:
    """The processes of one arm, which start by importing its backend's library; :meth:`build` then makes them the arm.

    Each request has its answer before the next one is made.
    """

    def __init__(
        self,
        backend: str = "bf16",
        environment: ArmEnvironment | None = None,
        fork: bool = False,
        device: str = "cuda",
        ranks: int = 1,
    ) -> None:
        """``environment``: another checkout. Without it the arm runs as this process does, with
        its current variables, import path and folder.

        ``fork``: start it as a fork where that comes to the same. Never where there is a GPU: a process that has used
        CUDA cannot be forked.
        """
        self.name = "an arm"
        self._asked, self.answer_due = "", False
        self._in = "in bfloat16"
        """What the arm's model is, in words."""
        self._side = f" ({environment.name})" if environment is not None else ""
        self._end: ArmError | None = None
        """What it ended with, where that was told."""
        self.ranks: list[Rank] = []
        try:
            for rank in range(ranks):
                variables = _variables(rank, ranks, self.ranks[0] if rank else None) if ranks > 1 else {}
                if device == "cpu":
                    variables |= ON_THE_CPU
                self.ranks.append(Rank(backend, environment, fork, variables))
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Of rank 0."""
        return self.ranks[0].pid

    @property
    def pids(self) -> set[int]:
        return {rank.pid for rank in self.ranks}

    @property
    def folder(self) -> Path:
        """Of rank 0."""
        return self.ranks[0].folder

    @property
    def alive(self) -> bool:
        return all(rank.alive for rank in self.ranks)

    def build(self, spec: ArmSpec, timeout: float = BUILD_SECONDS) -> dict[str, Any]:
        """Become this arm; gives what it says of itself. Raises :class:`ArmError`."""
        self.start_build(spec)
        answer: dict[str, Any] = self.receive(timeout)
        return answer

    def start_import(self) -> None:
        """Ask to tell once nothing is imported any more; :meth:`receive` waits for it."""
        self.send("import")

    def start_build(self, spec: ArmSpec) -> None:
        """Ask to become this arm; :meth:`receive` waits for it. Two arms can build at the same time."""
        self.name = spec.name + self._side
        self._in = f"in bfloat16 {'' if spec.case.recipe == 'none' else 'and converted to FP8 '}on {spec.device}"
        self.send("build", spec=to_plain(spec))

    def request(self, operation: str, timeout: float = REQUEST_SECONDS, **arguments: Any) -> Any:
        """Send one request and wait ``timeout`` seconds for its answer.

        Raises :class:`ArmError`. The process is then gone, except after an exception inside an arm of one rank: it can
        still answer.
        """
        self.send(operation, **arguments)
        return self.receive(timeout)

    def send(self, operation: str, **arguments: Any) -> None:
        """Send one request without waiting. Raises ``RuntimeError`` where the last request has no answer yet."""
        if self.answer_due:
            raise RuntimeError(f"{self.name!r} was asked to {operation!r} before it answered to {self._asked!r}")
        self._asked, self.answer_due = operation, True
        broken = []
        for rank, process in enumerate(self.ranks):
            try:
                process.ask(operation, arguments)
            except OSError:
                broken.append(rank)
        if broken:
            raise self._ended_with(_began({rank: self._death(rank) for rank in broken}))

    def receive(self, timeout: float = REQUEST_SECONDS) -> Any:
        """Wait ``timeout`` seconds for the answer to the last request: plain data or bytes, of all ranks together.
        Raises :class:`ArmError` as :meth:`request` does."""
        answers: dict[int, Any] = {}
        errors: dict[int, ArmError] = {}
        try:
            silent = self._collect(timeout, answers, errors)
        except BaseException:
            # Ctrl-C or a test's own time limit may end the wait. The late answer must not be read as the next one's.
            self.close()
            raise
        self.answer_due = False
        if silent and not errors:
            raise self._ended_with(self._hung(silent, timeout))
        if errors:
            error = _began(errors)
            # A step that was stopped in the middle leaves other ranks inside it.
            still_answers = len(self.ranks) == 1 and error.code in (R.ARM_RAISED, R.OUT_OF_MEMORY, R.CANNOT_SHIP)
            raise error if still_answers and self.alive else self._ended_with(error)
        try:
            return merged(self._asked, [answers[rank] for rank in range(len(self.ranks))])
        except RanksDisagree as found:
            difference = found
        raise ArmError(
            R.RANKS_DISAGREE,
            f"rank {difference.rank} of the arm {self.name!r} differs from rank 0: {difference.what}",
            expected=f"the same on all {len(self.ranks)} ranks",
            seen=f"rank 0: {difference.first}\nrank {difference.rank}: {difference.other}",
            cause=difference.cause,
            next_step=difference.next_step,
        )

    def _collect(self, timeout: float, answers: dict[int, Any], errors: dict[int, ArmError]) -> list[int]:
        """Fill in what each rank answers, or the error that it ended with; gives the ranks that said nothing in time,
        which is short once one has failed."""
        deadline = time.monotonic() + timeout
        silent = dict(enumerate(self.ranks))
        while silent:
            left = max(0.0, deadline - time.monotonic())
            ready = wait([process.connection for process in silent.values()], min(left, LOOK_SECONDS))
            told = [rank for rank, each in silent.items() if each.connection in ready or not each.alive]
            if not told and not left:
                break
            for rank in told:
                try:
                    answer = self.ranks[rank].answer()
                    if "error" in answer:
                        errors[rank] = self._raised(rank, answer)
                    else:
                        answers[rank] = answer["result"]
                except (EOFError, OSError, ValueError, LookupError, TypeError, RecursionError):
                    # No answer can come, or what came is none: code in the arm wrote to its socket.
                    errors[rank] = self._death(rank)
                del silent[rank]
                if errors:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return sorted(silent)

    def close(self) -> None:
        """End all processes and everything they started. Safe to call twice."""
        for process in self.ranks:
            process.close()

    def death(self) -> ArmError:
        """The error of an arm that has ended: the one that told of it, or that nothing was asked meanwhile."""
        if self._end is None:
            when = f"after it was asked to {self._asked!r}, before the next request of the same question"
            expected = "one process for all requests of a question: it keeps what they train"
            ended = [rank for rank, process in enumerate(self.ranks) if not process.alive] or [0]
            self._end = _began({rank: self._death(rank, when, expected) for rank in ended})
        return self._end

    # -- what went wrong ------------------------------------------------------------------------------------------

    def _ended_with(self, error: ArmError) -> ArmError:
        self.close()
        self._end = error
        return error

    def _called(self, rank: int) -> str:
        return repr(self.name + (f", rank {rank} of {len(self.ranks)}" if len(self.ranks) > 1 else ""))

    def _raised(self, rank: int, answer: Mapping[str, Any]) -> ArmError:
        said = {key: printable(text) for key, text in answer.items() if isinstance(text, str)}
        cause, line = said["cause"], said["line"]
        out_of_memory = said["code"] == R.OUT_OF_MEMORY
        return ArmError(
            R(said["code"]),
            f"the arm {self._called(rank)} ran out of GPU memory while it was asked to {self._asked!r}"
            if out_of_memory
            else f"{first_line(said['error'])}, in the arm {self._called(rank)} that was asked to {self._asked!r}",
            expected=f"to run in a process of its own, in the folder {os.getcwd()}, with the model {self._in}",
            # Where the trace is the cause, it already holds these lines.
            seen=said["error"] + (f"\n{line}" if cause and line else ""),
            cause=cause or said["trace"],
            next_step=said["next"] or f"run the lines of the trace by hand, with the model {self._in}",
        )

    def _hung(self, silent: Sequence[int], timeout: float) -> ArmError:
        for rank in silent:
            self.ranks[rank].show_stacks()
        time.sleep(0.5)
        which = f": ranks {', '.join(map(str, silent))}" if len(self.ranks) > 1 else ""
        return ArmError(
            R.ARM_HUNG,
            f"the arm {self.name!r} gave no answer to {self._asked!r} in {timeout:.0f} s and was stopped{which}",
            expected=f"an answer within {timeout:.0f} s",
            seen="\n".join(map(self._output, silent)),
            cause="a deadlock, or work far slower than planned; the stacks above say where it was. Of several ranks, "
            "one waits in a collective for another that does not call it",
        )

    def _death(self, rank: int, when: str = "", expected: str = "an answer") -> ArmError:
        code = self.ranks[rank].exit_code()
        how = "closed its connection, or wrote what is no answer," if code is None else how_ended(code)
        return ArmError(
            R.ARM_DIED,
            f"the arm {self._called(rank)} {how} {when or f'while it was asked to {self._asked!r}'}",
            expected=expected,
            seen=self._output(rank),
            cause=cause_of(code, tail_of(self.ranks[rank].log)),
        )

    def _output(self, rank: int) -> str:
        of = f" of rank {rank}" if len(self.ranks) > 1 else ""
        return f"the end of the output{of}:\n{tail_of(self.ranks[rank].log) or '(nothing)'}"


def _variables(rank: int, ranks: int, first: Rank | None) -> dict[str, str]:
    """A rank's variables, as ``torchrun`` sets them. Rank i takes the i-th GPU that this process sees. ``first``: rank
    0's process, for all others."""
    given = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    return {
        **{name: str(number) for name, number in given.items()},
        # Libraries ask whether they are there. Nobody listens.
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        **({STORE: str(first.folder / "store")} if first else {}),
        # As under torchrun: what rank 0 prepares in the temporary folder, the others find.
        **({"TMPDIR": first.temporary} if first and first.temporary else {}),
    }


def _began(errors: Mapping[int, ArmError]) -> ArmError:
    """The error of the ranks that the others follow from: a death or a lack of memory first, a broken connection
    last."""
    first = (R.ARM_DIED, R.OUT_OF_MEMORY)

    def order(rank: int) -> tuple[bool, bool, int]:
        return errors[rank].code not in first, bool(CONSEQUENCE.search(errors[rank].seen)), rank

    return errors[min(errors, key=order)]


def tail_of(log: Path) -> str:
    """The last lines of an arm's output; those with which the last stack of :mod:`faulthandler` begins where that is
    longer, for its innermost call comes first. Empty where the file cannot be read."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    stacks = [i for i, line in enumerate(lines) if STACK.match(line)]
    fatal = [i for i in stacks if lines[i].startswith("Fatal")]
    start = max(0, min([len(lines) - LOG_LINES, *(fatal or stacks)[-1:]]))
    return "\n".join(printable(line)[:400] for line in lines[start : start + LOG_LINES])


def printable(text: str) -> str:
    """The text without what a terminal obeys or no encoding can write."""
    return UNPRINTABLE.sub("", text)


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
            next_step=f"df -h {place}; df -i {place}; ulimit -a; TMPDIR=FOLDER names another place",
        ) from None


def how_ended(code: int) -> str:
    """``exited with 1``, ``died of SIGKILL``, by an exit code as :attr:`subprocess.Popen.returncode` has it."""
    if code >= 0:
        return f"exited with {code}"
    # Not all numbers have a name.
    return f"died of {signal.Signals(-code).name if -code in [*signal.Signals] else f'signal {-code}'}"


def cause_of(code: int | None, tail: str) -> str:
    """Of an arm's end, by its exit code, ``None`` while it runs, and the end of its output."""
    if OTHER_COLLECTIVES.search(tail):
        return (
            "ranks called other collectives than each other, or of other sizes: one of them skips, freezes or leaves "
            "unconverted what the others do not; or float8_all_gather, where they cannot share a weight's rows evenly"
        )
    if code is None:
        return "code in the arm closed or wrote to its file descriptors, or became another program (os.exec)"
    if code == -signal.SIGKILL:
        return "the system's out-of-memory killer, or a kill -9"
    if code < 0:
        return "a library crashed, and the output above says where, if it could; or some code sent this signal"
    return (
        "code in the arm ended its process, as os._exit() does; an exception outside of any question, as where torch "
        "cannot be imported, which the output then ends with; with 255 also: the process that arms on the CPU are "
        "forked from was killed"
    )


def end_of_process(
    process: subprocess.Popen[bytes] | ForkedProcess, connection: Connection | socket.socket, folder: Path
) -> None:
    """End a process and all that it started, and remove its folder."""
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
