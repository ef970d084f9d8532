"""What the fork server imports once for all arms on the CPU. Only the fork server imports this module.

Where an import fails, the arm that needs it imports it again and reports the error.
"""

from __future__ import annotations

import contextlib
import gc
import os

# Libraries warn when they are imported. An arm's output goes to its own log; the terminal is pytest's.
with open(os.devnull, "wb") as nowhere:
    os.dup2(nowhere.fileno(), 1)
    os.dup2(nowhere.fileno(), 2)
# Imports make next to no garbage, and a collection would write into pages that the arms share.
gc.disable()
with contextlib.suppress(Exception):
    import transformers.models.llama.modeling_llama  # noqa: F401

    import pytest_fp8.worker.server  # noqa: F401
with contextlib.suppress(Exception):
    # torchao's conversion imports it, compiled or not: a third of a second.
    import torchao.float8  # noqa: F401
gc.freeze()
