"""One run of a user's script as an arm: its command, and a connection to each of its ranks, held between two steps."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import socket
import subprocess
import time
import weakref
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pytest_fp8.arms.environment import ArmEnvironment, arm_env
from pytest_fp8.arms.process import (
    BUILD_SECONDS,
    LOOK_SECONDS,
    ON_THE_CPU,
    REQUEST_SECONDS,
    ArmProcess,
    Rank,
    end_of_process,
    how_ended,
    tail_of,
)
from pytest_fp8.arms.scratch import new_folder, remove
from pytest_fp8.arms.spec import ArmSpec
from pytest_fp8.codes import Code, R, W
from pytest_fp8.errors import ArmError
from pytest_fp8.own_code import NOT_FROM
from pytest_fp8.script.command import Script
from pytest_fp8.watch import FAILED, FOLDER, HOLD
from pytest_fp8.watch.command import INJECTED, evidence_in

ENDING_SECONDS = 60.0
OUT_OF_MEMORY = ("OutOfMemoryError", "CUDA out of memory")


class HeldRank(Rank):
    """The connection to one process that trains. The command's end is its end, and what ends it ends them all."""

    def __init__(self, script: ScriptProcess, connection: Connection, told: Mapping[str, Any]) -> None:
        assert script.process is not None
        self.log, self.folder, self._process = script.log, script.folder, script.process
        self.pid, self.close = int(told["pid"]), script.finalizer
        self._talk_over(connection)


class ScriptProcess(ArmProcess):
    """A script that is asked what an arm is asked. It runs until it is warm, and then as far as requests let it."""

    folder = log = Path()
    process: subprocess.Popen[bytes] | None = None
    """The command's."""

    def __init__(self, environment: ArmEnvironment | None = None) -> None:
        """Starts nothing yet: an arm is a command with its arguments."""
        super().__init__(environment=environment, ranks=0)
        self._environment, self._in = environment, "that its command trains"
        self.folder = new_folder("arm-")
        self.log = self.folder / "log"
        self.listener = socket.socket(socket.AF_UNIX)

    def start_build(self, spec: ArmSpec) -> None:
        """Start the command. :meth:`receive` waits until it is held."""
        assert spec.workload is not None
        script = Script.from_text(spec.workload)
        self.command, self.wanted = script.of(spec.case), spec.case.gpus
        self.name = f"{spec.case.id}{self._side}"
        self._asked = "build"
        self.listener.bind(str(self.folder / "hold"))
        self.listener.listen(self.wanted)
        self.listener.settimeout(LOOK_SECONDS)
        env = self._env(script, spec.device)
        with open(self.log, "wb") as log:
            try:
                self.process = subprocess.Popen(
                    self.command,
                    cwd=self._cwd(),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env=env,
                )
            except OSError as error:
                by_hand = f"run it by hand in the project's folder: {shlex.join(self.command)}"
                raise self._error(R.NOT_STARTED, f"did not start: {error}", by_hand) from None
        self.finalizer = weakref.finalize(self, end_of_process, self.process, self.listener, self.folder)

    def _env(self, script: Script, device: str) -> dict[str, str]:
        """The user's own variables, and those by which the observer is found. Base's code comes first on its path."""
        side = self._environment
        path = [str(INJECTED), *(side.import_path if side is not None else ()), os.environ.get("PYTHONPATH", "")]
        env = arm_env("bf16", self.folder)
        # Libraries of pytest's own process may be others than the command's.
        env |= {"PYTHONPATH": os.pathsep.join(filter(None, path)), "KINETO_LOG_LEVEL": "6"}
        for name in ("CUDNN_HOME", "LD_LIBRARY_PATH"):
            env.pop(name, None)
            if name in os.environ:
                env[name] = os.environ[name]
        if side is not None:
            env[NOT_FROM] = side.not_from
        if device == "cpu":
            env |= {**ON_THE_CPU, "CUDA_VISIBLE_DEVICES": ""}
        return {**env, FOLDER: str(self.folder), HOLD: str(self.folder / "hold"), **script.env}

    def _cwd(self) -> str | None:
        """The folder that the command runs in: pytest's own, or the same one of base's checkout."""
        here, _, tree = (self._environment.not_from if self._environment is not None else "").partition(os.pathsep)
        return os.path.normpath(Path(tree, os.path.relpath(os.getcwd(), here))) if tree else None

    def receive(self, timeout: float = REQUEST_SECONDS) -> Any:
        if not self.ranks:
            self._connect(timeout)
            # The rule for several ranks is that of a build.
            self.send("describe")
            timeout = BUILD_SECONDS
        return super().receive(timeout)

    def _connect(self, timeout: float) -> None:
        """Wait until each rank is held. Raises :class:`ArmError`."""
        deadline = time.monotonic() + timeout
        found: dict[int, HeldRank] = {}
        while len(found) < self.wanted:
            with contextlib.suppress(TimeoutError):
                connection = Connection(self.listener.accept()[0].detach())
                told = json.loads(connection.recv_bytes())
                if told["world"] != self.wanted:
                    said = f"trains on {told['world']} ranks, and its mark says {self.wanted}"
                    mark = f"@pytest.mark.fp8_script(..., gpus={told['world']})"
                    raise self._ended_with(self._error(R.BAD_VALUE, said, mark))
                found[told["rank"]] = HeldRank(self, connection, told)
                continue
            assert self.process is not None
            exit_code = self.process.poll()
            if exit_code is not None or self._failed():
                raise self._ended_with(self._ended(exit_code, "before it was held at a step"))
            if time.monotonic() > deadline:
                began = any(True for _ in evidence_in(self.folder))
                what = "it began to train and waits, or its steps repeat in no order" if began else "it makes no step"
                said = f"was not held after {timeout:.0f} s, and was stopped: {what}"
                watch = f"pytest-fp8 watch -- {shlex.join(self.command)}"
                raise self._ended_with(self._error(R.ARM_HUNG, said, watch))
        self.ranks = [found[rank] for rank in sorted(found)]

    def _raised(self, rank: int, answer: Mapping[str, Any]) -> ArmError:
        if not answer["code"].startswith("FP8-W"):
            return super()._raised(rank, answer)
        return self._error(W(answer["code"]), f"cannot be asked for {self._asked!r}: {answer['error']}")

    def _failed(self) -> list[Mapping[str, Any]]:
        """What the observer said that gave up in processes of the script."""
        return [each for each in evidence_in(self.folder) if each["state"] == FAILED]

    def _ended(self, exit_code: int | None, when: str) -> ArmError:
        code, reason = None, ""
        for each in self._failed()[:1]:
            code, reason = W(each["code"]), each["reason"]
        if code is W.TOO_SHORT and exit_code is None:
            # Told as it ends, before its exit code says whether it crashed.
            assert self.process is not None
            with contextlib.suppress(subprocess.TimeoutExpired):
                exit_code = self.process.wait(ENDING_SECONDS)
        if any(word in tail_of(self.log) for word in OUT_OF_MEMORY):
            return self._error(R.OUT_OF_MEMORY, "ran out of GPU memory", "a smaller batch in both arms")
        if code is None and exit_code == 0:
            code, reason = (W.TOO_SHORT if self.ranks else W.NO_TRAINING), f"it ended {when}"
        if code is None or (code is W.TOO_SHORT and exit_code):
            by_hand = f"run it by hand: {shlex.join(self.command)}"
            how = how_ended(exit_code) if exit_code is not None else "closed its connection"
            return self._error(R.ARM_DIED, f"{how} {when}", by_hand)
        return self._error(code, f"cannot be held: {reason}")

    def _death(self, rank: int, when: str = "", expected: str = "an answer") -> ArmError:
        """Of a rank that was held before."""
        return self._ended(self.ranks[rank].exit_code(), when or f"while it was asked for {self._asked!r}")

    def _error(self, code: Code, said: str, next_step: str = "") -> ArmError:
        """``next_step``: that of the code's page where it is empty."""
        return ArmError(
            code,
            f"the script {self.name!r} {said}",
            expected="a command that trains, with steps that a hook of torch's optimizers tells",
            seen=f"the end of its output:\n{tail_of(self.log) or '(nothing)'}",
            next_step=next_step,
        )

    def close(self) -> None:
        """End the script and all that it started. Safe to call twice."""
        if self.process is None:
            self.listener.close()
            remove(self.folder)
        else:
            self.finalizer()
