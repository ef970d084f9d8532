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

from pytest_fp8.arms.spec import ArmSpec
from pytest_fp8.descriptors import write_all
from pytest_fp8.errors import ArmError

if TYPE_CHECKING:
    from pytest_fp8.arms.environment import ArmEnvironment

BUILD_SECONDS = 420.0
REQUEST_SECONDS = 300.0
FEW_CORES = 4
"""With more, two arms and their neighbours have cores enough to spin on."""
LOG_LINES = 25


class ArmProcess:
    """One worker process. Started with its backend's library alone; :meth:`build` tells it which arm to be."""

    def __init__(
        self, backend: str = "bf16", log_folder: Path | None = None, environment: ArmEnvironment | None = None
    ) -> None:
        """``environment``: another interpreter or another checkout; without it the arm runs as this process does."""
        requests_read, self._requests = os.pipe()
        self._answers, answers_write = os.pipe()
        handle, name = tempfile.mkstemp(prefix="fp8-arm-", suffix=".log", dir=log_folder)
        self.log = Path(name)
        descriptors = [str(requests_read), str(answers_write)]
        python = environment.python if environment is not None else sys.executable
        self._held = contextlib.ExitStack()
        command = [python, "-m", "pytest_fp8.arms.worker", *descriptors, str(os.getpid()), backend]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=handle,
                stderr=subprocess.STDOUT,
                pass_fds=(requests_read, answers_write),
                start_new_session=True,
                env={**self._variables(environment), **self._places(backend)},
            )
        finally:
            for descriptor in (requests_read, answers_write, handle):
                os.close(descriptor)
        self.name = "an arm"
        self._buffer = b""
        self._asked, self._answer_due = "", False
        # Also runs at interpreter exit, so that a session that ends badly leaves no arm behind.
        self._finalizer = weakref.finalize(self, _end, self._process, self._requests, self._answers, self.log)

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
        except (BrokenPipeError, OSError) as error:
            self._raise_dead(error)

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
                    self._raise_dead(None)
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
        raise ArmError(
            kind,
            f"the arm {self.name!r} {'ran out of GPU memory' if kind == 'out of memory' else 'raised'} "
            f"while it was asked to {self._asked!r}",
            expected=f"{self._asked!r} to succeed",
            seen=answer["error"],
            cause=answer.get("cause", "") or answer.get("trace", ""),
            next_step=answer.get("next", ""),
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

    def _raise_dead(self, error: BaseException | None) -> None:
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
        ) from error


def arm_environment() -> dict[str, str]:
    """This process's environment, with the one addition that keeps two cuDNN libraries out of one arm.

    Transformer Engine looks for a system cuDNN before the one torch came with. Where both exist, torch finds itself
    with a version it was not built for and picks another attention kernel without a word, or loading fails.
    ``CUDNN_HOME`` and ``LD_LIBRARY_PATH`` name torch's own, in every arm: torch works with no other.
    """
    import importlib.util

    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    if len(os.sched_getaffinity(0)) <= FEW_CORES:
        # Threads that wait for each other by spinning take the cores from those they wait for, once anything else
        # runs beside them: 1.3 s became 41 s on two busy cores.
        environment.setdefault("OMP_WAIT_POLICY", "passive")
    spec = None
    with contextlib.suppress(ModuleNotFoundError, ValueError):
        spec = importlib.util.find_spec("nvidia.cudnn")
    if spec is not None and spec.submodule_search_locations:
        _point_at_cudnn(environment, next(iter(spec.submodule_search_locations)))
    return environment


def other_environment(chosen: ArmEnvironment, instrument: str) -> dict[str, str]:
    """The same for an arm of another interpreter or checkout: its own cuDNN, its own import path."""
    environment = {**os.environ, **chosen.variables(instrument)}
    if chosen.cudnn:
        _point_at_cudnn(environment, chosen.cudnn)
    return environment


def _point_at_cudnn(environment: dict[str, str], home: str) -> None:
    environment["CUDNN_HOME"] = home
    # Its parts (libcudnn_graph, ...) are found by the loader, which knows nothing of CUDNN_HOME.
    paths = [str(Path(home) / "lib"), *filter(None, [environment.get("LD_LIBRARY_PATH")])]
    environment["LD_LIBRARY_PATH"] = os.pathsep.join(paths)


def _signal_name(number: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def _end(process: subprocess.Popen[bytes], requests: int, answers: int, log: Path) -> None:
    # Closing the request pipe is the polite word; the group is killed either way, compile workers included.
    for descriptor in (requests, answers):
        with contextlib.suppress(OSError):
            os.close(descriptor)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=0.2)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    with contextlib.suppress(OSError):
        log.unlink()
