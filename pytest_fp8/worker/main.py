"""The process of an arm: ``python -m pytest_fp8.worker.main SOCKET PARENT BACKEND``.

It answers requests on the socket, whose file descriptor it inherits, one after another. It ends when the other side
closes or when the process PARENT is gone. Nothing here runs inside pytest.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

from pytest_fp8.arms.spec import ArmSpec
from pytest_fp8.codes import R
from pytest_fp8.ending import when_parent_ends
from pytest_fp8.plain import from_plain
from pytest_fp8.worker import compilers


def main(arguments: list[str]) -> int:
    descriptor, parent, backend = int(arguments[0]), int(arguments[1]), arguments[2]
    die_with(parent)
    show_stacks()
    import_ahead(backend)
    serve(Connection(descriptor))
    return 0


def forked(connection: Connection, log: str, backend: str, env: dict[str, str]) -> None:
    """The same for an arm that the fork server forked: a session and a log of its own, the variables of its test."""
    os.setsid()
    die_with(os.getppid())
    with open(log, "ab") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None  # what the fork server's was
    # A daemon may have no children, and a user's DataLoader may want workers. They end with the arm's process group.
    multiprocessing.current_process().daemon = False
    # A child of the fork server would start these through one, too: a DataLoader's workers each import torch anew, and
    # a dataset of many tensors is more than its socket carries. A user's script has the default.
    multiprocessing.set_start_method(None, force=True)
    show_stacks()
    import_ahead(backend)
    serve(connection)
    # multiprocessing's own end would first take apart what is shared with the fork server.
    os._exit(0)


def serve(connection: Connection) -> None:
    """Answer until no more requests can come. ``import`` is answered once nothing is imported any more, also by torch's
    processes for compilation; ``build`` makes this process one arm."""
    server: Any = None
    own = os.getpid()
    # Programs that the arm starts, or execs, do not keep its socket open.
    os.set_inheritable(connection.fileno(), False)
    for request in _requests(connection):
        try:
            if request["operation"] == "build":
                if server is not None:
                    raise RuntimeError("asked to build a second arm")
                from pytest_fp8.worker.server import ArmServer

                server = ArmServer(from_plain(ArmSpec, request["arguments"]["spec"]))
                compilers.wait()
                result: Any = server.describe()
            elif request["operation"] == "import":
                compilers.wait()
                result = None
            elif server is None:
                raise RuntimeError("asked before it was built")
            else:
                result = server.answer(request["operation"], request["arguments"])
            answer = {"bytes": len(result)} if isinstance(result, bytes) else {"result": result}
        except BaseException as error:
            answer, result = told(error), None
        if os.getpid() != own:
            # A fork in the user's code that came back here as well: the arm itself answers.
            os._exit(0)
        # JSON as Python writes it: NaN and infinities, which a loss may be, come back as such.
        connection.send_bytes(json.dumps({"id": request["id"], **answer}).encode())
        if isinstance(result, bytes):
            connection.send_bytes(result)


def _requests(connection: Connection) -> Iterator[dict[str, Any]]:
    # A reset instead of an end: the other side closed before it had read an answer.
    with contextlib.suppress(EOFError, ConnectionResetError):
        while True:
            yield json.loads(connection.recv_bytes())


def import_ahead(name: str) -> None:
    """Import what an arm of this backend needs, so that a process started early is ready when it is wanted.

    A library of the backend's own that is missing is reported when the arm is built, not here.
    """
    # Imports make next to no garbage. Looking for it meanwhile, and in each collection afterwards, takes half a second
    # of five.
    gc.disable()
    try:
        _import_libraries(name)
    finally:
        # Freeze the heap, so that later collections skip it.
        gc.freeze()
        gc.enable()


def _import_libraries(name: str) -> None:
    import torch

    from pytest_fp8.backends import LibraryError, backend, import_library

    if not backend(name).brings_model:
        _raise_what_failed_ahead()
        if torch.cuda.is_available():
            compilers.start()
        import transformers.models.llama.modeling_llama  # noqa: F401

        import pytest_fp8.worker.server  # noqa: F401

        if torch.cuda.is_available():
            # The first compiled step would import it: 2.7 to 3.3 s of a build, on two cores.
            import torch._inductor.compile_fx
    with contextlib.suppress(LibraryError):
        import_library(name)


def _raise_what_failed_ahead() -> None:
    """The error of the fork server's own import of the same, in a fork of it."""
    preload = sys.modules.get("pytest_fp8.worker.preload")
    if preload is not None and preload.failed is not None:
        raise preload.failed


def show_stacks() -> None:
    """Write the stack of a thread that crashes to the arm's output, and those of all threads on SIGUSR1."""
    faulthandler.enable(all_threads=False)
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def told(error: BaseException) -> dict[str, Any]:
    """An exception as plain data. The user's code may have left the process without files, memory or output."""
    # The log alone: what is told below has the trace, too.
    with contextlib.suppress(Exception):
        traceback.print_exc()
    try:
        return _describe(error)
    except Exception as further:
        said = traceback.format_exception_only(error)[-1].strip()[:2000]
        cause = f"no more can be said, as the arm then raised {type(further).__name__}: {str(further)[:500]}"
        return {"error": said, "code": R.ARM_RAISED, "trace": "", "line": "", "cause": cause, "next": ""}


def _describe(error: BaseException) -> dict[str, Any]:
    """Empty text: there is nothing to say."""
    import torch

    from pytest_fp8.worker import error_trace

    code, cause, next_step = error_trace.known_cause(error)
    described = {
        "error": f"{type(error).__name__}: {str(error).lstrip()[:2000]}",
        "code": code,
        "trace": error_trace.trace_of(error),
        "line": error_trace.telling_line(error),
        "cause": cause,
        "next": next_step,
    }
    if code is R.OUT_OF_MEMORY:
        torch.cuda.empty_cache()
    return described


def die_with(parent: int) -> None:
    """Ask the kernel for SIGKILL when the parent ends, so that not even ``kill -9`` of pytest leaves an arm."""
    when_parent_ends(signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the parent process is gone")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
