"""An arm seen from pytest: a child process, spoken to in JSON lines, that never outlives its parent.

Requests go down one pipe and answers come up another; the arm's own output goes to a file whose end is quoted when
something goes wrong. Whatever happens to an arm (an exception, no answer, no memory, a signal) becomes one
:class:`~pytest_fp8.errors.ArmError`, and its whole process group is gone afterwards.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_fp8.arms.env import arm_environment, other_environment
from pytest_fp8.arms.spec import ArmSpec
from pytest_fp8.descriptors import write_all
from pytest_fp8.errors import ArmError

if TYPE_CHECKING:
    from pytest_fp8.arms.environment import ArmEnvironment
    from pytest_fp8.arms.forked import ForkedProcess, Template

BUILD_SECONDS = 420.0
REQUEST_SECONDS = 300.0
LOG_LINES = 25


class FreshProcess(subprocess.Popen[bytes]):
    """An arm in an interpreter of its own, a child of this process."""

    def reap(self) -> None:
        """Wait for the end, as :meth:`ForkedProcess.reap` does."""
        self.wait()


class ArmProcess:
    """One worker process. Started with its backend's library alone; :meth:`build` tells it which arm to be."""

    def __init__(
        self,
        backend: str = "bf16",
        log_folder: Path | None = None,
        environment: ArmEnvironment | None = None,
        template: Template | None = None,
    ) -> None:
        """``environment``: another interpreter or another checkout; without it the arm runs as this process does.
        ``template``: what it is forked from where that comes to the same; never for an arm on a GPU."""
        requests_read, self._requests = os.pipe()
        self._answers, answers_write = os.pipe()
        handle, name = tempfile.mkstemp(prefix="fp8-arm-", suffix=".log", dir=log_folder)
        self.log = Path(name)
        self._held = contextlib.ExitStack()
        self.not_forked = ""
        """Why there is an interpreter of its own although there is a template."""
        try:
            places = self._places(backend)
            variables = {**self._variables(environment), **places}
            # What patches other libraries patches none that somebody else has imported.
            alike = environment is None and not places
            forked = self._fork(template, backend, variables, requests_read, answers_write, handle) if alike else None
            python = environment.python if environment is not None else sys.executable
            words = (requests_read, answers_write, os.getpid(), backend)
            self._process: ForkedProcess | FreshProcess = forked or FreshProcess(
                [python, "-m", "pytest_fp8.worker.main", *map(str, words)],
                stdin=subprocess.DEVNULL,
                stdout=handle,
                stderr=subprocess.STDOUT,
                pass_fds=(requests_read, answers_write),
                start_new_session=True,
                env=variables,
            )
        finally:
            for descriptor in (requests_read, answers_write, handle):
                os.close(descriptor)
        self.name = "an arm"
        self._buffer = b""
        self._asked, self._answer_due = "", False
        # Also runs at interpreter exit, so that a session that ends badly leaves no arm behind.
        self._finalizer = weakref.finalize(self, _end, self._process, self._requests, self._answers, self.log)

    def _fork(
        self, template: Template | None, backend: str, variables: dict[str, str], requests: int, answers: int, log: int
    ) -> ForkedProcess | None:
        if template is None:
            return None
        from pytest_fp8.arms.forked import CannotFork

        try:
            return template.fork(backend, variables, requests, answers, log)
        except CannotFork as reason:
            self.not_forked = str(reason)
            return None

    def _places(self, backend: str) -> dict[str, str]:
        """A library that patches others also leaves files about (Unsloth: quantized copies, generated code in the
        current folder): it gets a folder of its own for them, which goes with the process."""
        from pytest_fp8.backends import backend as backend_named

        if not backend_named(backend).patches_others:
            return {}
        folder = self._held.enter_context(tempfile.TemporaryDirectory(prefix="fp8-", ignore_cleanup_errors=True))
        # Compiled code alone is kept: building it again takes half a minute.
        compiled = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"
        kept = {"TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(compiled))}
        return {**kept, "TMPDIR": folder, "UNSLOTH_COMPILE_LOCATION": str(Path(folder) / "compiled")}

    def _variables(self, environment: ArmEnvironment | None) -> dict[str, str]:
        if environment is None:
            variables = arm_environment()
        else:
            from pytest_fp8.arms.environment import instrument

            variables = other_environment(environment, self._held.enter_context(instrument()))
        return {"HF_HUB_DISABLE_TELEMETRY": "1", **variables}

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def start_build(self, spec: ArmSpec) -> None:
        """Ask the process to become this arm; :meth:`receive` waits for it. Two arms can build at the same time."""
        self.name = spec.name
        self.send("build", spec=spec.to_json())

    def build(self, spec: ArmSpec, timeout: float = BUILD_SECONDS) -> dict[str, Any]:
        self.start_build(spec)
        answer: dict[str, Any] = self.receive(timeout)
        return answer

    def request(self, operation: str, timeout: float = REQUEST_SECONDS, **arguments: Any) -> Any:
        """Send one request and wait for its answer. Raises :class:`ArmError`; the process is then already gone,
        except after an exception inside the arm, which leaves it able to answer."""
        self.send(operation, **arguments)
        return self.receive(timeout)

    def send(self, operation: str, **arguments: Any) -> None:
        """Ask without waiting. Answers carry no name: a second question before the first one's answer is a mistake."""
        if self._answer_due:
            raise RuntimeError(f"{self.name!r} was asked to {operation!r} before it answered to {self._asked!r}")
        self._asked, self._answer_due = operation, True
        line = json.dumps({"operation": operation, "arguments": arguments}) + "\n"
        try:
            write_all(self._requests, line.encode())
        except (BrokenPipeError, OSError):
            self._raise_dead()

    def receive(self, timeout: float = REQUEST_SECONDS) -> Any:
        """Wait for the answer to what was sent. Raises :class:`ArmError` as :meth:`request` does."""
        try:
            answer = self._read(timeout)
        except BaseException:
            # Whatever interrupts the wait (Ctrl-C, a test's own time limit), the next question must not be given this
            # one's answer.
            self.close()
            raise
        self._answer_due = False
        if "error" in answer:
            self._raise_error(answer)
        return answer["result"]

    def _read(self, timeout: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0:
                self._raise_hung(timeout)
            ready, _, _ = select.select([self._answers], [], [], min(left, 1.0))
            if ready:
                chunk = os.read(self._answers, 1 << 20)
                if not chunk:
                    self._raise_dead()
                self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process and everything it started. Safe to call twice."""
        self._finalizer()
        self._held.close()

    def tail(self) -> str:
        """The last lines of the arm's own output."""
        with contextlib.suppress(OSError):
            lines = self.log.read_text(errors="replace").splitlines()
            return "\n".join(line[:400] for line in lines[-LOG_LINES:])
        return ""

    # -- what went wrong ------------------------------------------------------------------------------------------

    def _raise_error(self, answer: dict[str, Any]) -> None:
        kind = answer.get("kind", "raised")
        cause, line = answer.get("cause", ""), answer.get("line", "")
        raise ArmError(
            kind,
            f"the arm {self.name!r} {'ran out of GPU memory' if kind == 'out of memory' else 'raised'} "
            f"while it was asked to {self._asked!r}",
            expected=f"{self._asked!r} to succeed",
            # Where there is no better cause than the trace, the line of the user's own is in it.
            seen=answer["error"] + (f"\n{line}" if cause and line else ""),
            cause=cause or answer.get("trace", ""),
            next_step=answer.get("next", "") or "do by hand what the trace's lines do, with the model in bfloat16",
        )

    def _raise_hung(self, timeout: float) -> None:
        # faulthandler in the worker writes every thread's stack to the log on SIGUSR1.
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGUSR1)
            time.sleep(0.5)
        tail = self.tail()
        self.close()
        raise ArmError(
            "hung",
            f"the arm {self.name!r} gave no answer to {self._asked!r} in {timeout:.0f} s and was stopped",
            expected=f"an answer within {timeout:.0f} s",
            seen=f"the end of its output:\n{tail}",
            cause="a deadlock, or work far slower than planned; the stacks above say where it was",
            next_step="run the same case alone with -k, and watch nvidia-smi",
        )

    def _raise_dead(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)
        code = self._process.returncode
        tail = self.tail()
        self.close()
        how = "is no longer there" if code is None else f"exited with {code}"
        if code is not None and code < 0:
            how = f"died of {_signal_name(-code)}"
        cause = "the system's out-of-memory killer, or someone's kill -9" if code == -signal.SIGKILL else ""
        raise ArmError(
            "died",
            f"the arm {self.name!r} {how} while it was asked to {self._asked!r}",
            expected="an answer",
            seen=f"the end of its output:\n{tail or '(nothing)'}",
            cause=cause,
            next_step="read the output above; `dmesg | tail` names a process the system killed",
        ) from None  # a broken pipe is how it was noticed, and says nothing more


def _signal_name(number: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def _end(process: ForkedProcess | FreshProcess, requests: int, answers: int, log: Path) -> None:
    # Closing the request pipe is the polite word; the group is killed either way, compile workers included.
    for descriptor in (requests, answers):
        with contextlib.suppress(OSError):
            os.close(descriptor)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=0.2)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.reap()
    with contextlib.suppress(OSError):
        log.unlink()
