"""The process of an arm: ``python -m pytest_fp8.worker.main REQUESTS ANSWERS PARENT BACKEND``.

Reads one JSON request a line from the descriptor REQUESTS, answers one a line on ANSWERS. Ends when the pipe closes or
when the process PARENT is gone. Nothing here runs inside pytest.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import json
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from typing import Any

from pytest_fp8.descriptors import write_all


def main(arguments: list[str]) -> int:
    requests, answers, parent = (int(value) for value in arguments[:3])
    die_with(parent)
    return serve(requests, answers, arguments[3])


def serve(requests: int, answers: int, backend: str) -> int:
    """Answer until no more requests can come."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    _import_ahead(backend)
    server = None
    for request in _lines(requests):
        try:
            if request["operation"] == "build":
                server = _server(request["arguments"]["spec"])
                result: Any = server.describe()
            elif server is None:
                raise RuntimeError("asked before it was built")
            else:
                result = server.answer(request["operation"], request["arguments"])
            answer = {"result": result}
        except Exception as error:
            answer = _describe(error)
        _send(answers, answer)
    return 0


def _server(spec: dict[str, Any]) -> Any:
    from pytest_fp8.arms.spec import ArmSpec
    from pytest_fp8.worker.server import ArmServer

    return ArmServer(ArmSpec.from_json(spec))


def _import_ahead(name: str) -> None:
    """Import what an arm of this backend needs, so that a process started before it is wanted is ready when it is.

    A library that is not there is reported when the arm is built, not here.
    """
    # Next to nothing that an import makes is garbage. To look through it meanwhile, and in each collection afterwards,
    # takes half a second of five.
    gc.disable()
    try:
        import_libraries(name)
    finally:
        gc.freeze()
        gc.enable()


def import_libraries(name: str) -> None:
    """Import what an arm of this backend needs; a library of its own that is not there is passed over."""
    import torch  # noqa: F401

    from pytest_fp8.backends import backend

    chosen = backend(name)
    if not chosen.patches_others:
        import transformers.models.llama.modeling_llama  # noqa: F401
    # Without an accelerator Unsloth cannot be imported, and says so by a NotImplementedError.
    with contextlib.suppress(ImportError, NotImplementedError):
        chosen.import_library()


def _lines(descriptor: int) -> Iterator[dict[str, Any]]:
    with os.fdopen(descriptor, "rb") as stream:
        for line in stream:
            yield json.loads(line)


def _send(descriptor: int, answer: dict[str, Any]) -> None:
    # The answer is JSON with NaN and infinities, which Python's json reads back: a loss may be either.
    write_all(descriptor, (json.dumps(answer) + "\n").encode())


def _describe(error: Exception) -> dict[str, Any]:
    traceback.print_exc()
    import torch

    from pytest_fp8.worker import error_trace

    described = {
        "error": f"{type(error).__name__}: {str(error)[:2000]}",
        "kind": "raised",
        "trace": error_trace.trace_of(error),
        "line": error_trace.users_line(error),
    }
    if error_trace.mixes_types(error):
        described["cause"], described["next"] = error_trace.MIXED_CAUSE, error_trace.MIXED_NEXT
    if isinstance(error, torch.OutOfMemoryError):
        described["kind"] = "out of memory"
        described["cause"] = "the model, its optimizer state and one step's activations do not fit beside what is there"
        described["next"] = "nvidia-smi shows what holds the memory; a smaller batch or seq makes the step smaller"
        torch.cuda.empty_cache()
    for name in ("cause", "next"):
        text = getattr(error, f"fp8_{name}", "")
        if text:
            described[name] = text
    return described


def die_with(parent: int) -> None:
    """Ask the kernel for SIGKILL when the parent goes, so that not even ``kill -9`` of pytest leaves an arm."""
    set_parent_death_signal = 1
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the parent process is gone")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
