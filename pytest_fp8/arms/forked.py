"""Arms on the CPU start as forks of one process that has imported their libraries: seconds less for each arm.

The standard library's fork server does the work (:mod:`multiprocessing.forkserver`). It ends with this process.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.util import get_temp_dir
from pathlib import Path
from unittest.mock import patch

from pytest_fp8.arms.scratch import MARK, session_folder, sockets_fit

PRELOAD = "pytest_fp8.worker.preload"
MAY_DIFFER = (
    "PYTEST_CURRENT_TEST",
    "PYTHONPATH",
    "TMPDIR",
    MARK,
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "TORCHINDUCTOR_CACHE_DIR",
)
"""Variables that may differ from the fork server's: pytest sets the first one anew for each test, multiprocessing gives
each fork this process's import path as it is, and each arm has a folder of its own. Libraries set the last two, also in
this process where a test of the user's loads a model: DeepSpeed when it is imported, also by Accelerate, and torch's
compiler. torch reads both whenever it needs them."""
_started_with: dict[str, str] = {}
"""The variables that the fork server was started with; empty before the first arm."""


class ForkedProcess:
    """What :class:`subprocess.Popen` offers of an arm, for an arm that the fork server forked."""

    def __init__(self, connection: Connection, log: Path, backend: str, env: Mapping[str, str]) -> None:
        from pytest_fp8.worker.main import forked

        context = multiprocessing.get_context("forkserver")
        # A daemon: multiprocessing ends it at exit and does not wait for it.
        self._process = context.Process(target=forked, args=(connection, str(log), backend, dict(env)), daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, or minus the number of the signal that ended it; ``None`` while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end, ``timeout`` in seconds. Raises :class:`subprocess.TimeoutExpired`."""
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired("an arm", timeout or 0.0)
        return code


def can_fork(env: Mapping[str, str]) -> bool:
    """Whether an arm with these variables may be a fork. Starts the fork server when first asked.

    Libraries read variables when they are imported, so a fork cannot be given others. multiprocessing runs a script
    again that started this process, unless it is pytest's own; then arms start as fresh interpreters. So they do where
    the temporary folder's name is too long for the fork server's socket.
    """
    folder = session_folder()
    if not sockets_fit(folder):
        return False
    wanted = {name: value for name, value in env.items() if name not in MAY_DIFFER}
    if not _started_with:
        if not _started_by_pytest():
            return False
        _started_with.update(wanted)
        multiprocessing.get_context("forkserver").set_forkserver_preload([PRELOAD])
        # It imports the arms' libraries from this import path, and outlives the arm that it is started for.
        own = {"PYTHONPATH": env["PYTHONPATH"], "TMPDIR": tempfile.gettempdir()}
        with patch.dict(os.environ, {**wanted, **own}, clear=True), patch.object(tempfile, "tempdir", str(folder)):
            forkserver.ensure_running()
    return wanted == _started_with and _has_socket()


def _has_socket() -> bool:
    """Whether the fork server can be asked: somebody may have deleted the folder of its socket."""
    folder = Path(get_temp_dir())
    return folder.is_dir() and any(folder.iterdir())


def _started_by_pytest() -> bool:
    main = sys.modules["__main__"]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None:
        return bool(spec.name.endswith("__main__"))
    return file is None or Path(file).name in ("pytest", "py.test")
