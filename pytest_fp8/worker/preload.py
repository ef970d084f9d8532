"""What the fork server imports once for all arms on the CPU. Only the fork server imports this module.

Where an import fails, the arm that needs it reports the error.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from pytest_fp8.worker.main import die_with, import_ahead


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Libraries warn when they are imported, and the terminal is pytest's. Restored afterwards: processes of the
    user's own tests may come from this fork server too."""
    held = [os.dup(stream) for stream in (1, 2)]
    with open(os.devnull, "wb") as nowhere:
        for stream in (1, 2):
            os.dup2(nowhere.fileno(), stream)
    try:
        yield
    finally:
        for stream, was in zip((1, 2), held, strict=True):
            os.dup2(was, stream)
            os.close(was)


# Without it the fork server outlives pytest by the seconds that Python takes to end with torch loaded; its arms end
# with it.
die_with(os.getppid())
# Its arms compile nothing: no processes for that, also where torch sees a GPU that pytest-fp8 does not.
os.environ["TORCH_WARM_POOL"] = "0"
failed: Exception | None = None
"""What the arms need and could not be imported. Half of it stays behind, and a second import tells of that alone."""
with _silent():
    try:
        import_ahead("bf16")
    except Exception as error:
        failed = error
    # The arm that needs it reports the error.
    with contextlib.suppress(Exception):
        # torchao's conversion imports it, compiled or not: a third of a second.
        import torch._inductor.codegen.triton  # noqa: F401

        import_ahead("torchao")
