"""What the fork server imports once for all arms on the CPU: torch, transformers, torchao, this package's own side."""

from __future__ import annotations

import contextlib
import gc

# Imports make next to no garbage; a collection would write into pages that the arms share.
gc.disable()

import transformers.models.llama.modeling_llama  # noqa: E402, F401

import pytest_fp8.worker.server  # noqa: E402, F401

with contextlib.suppress(ImportError):
    # torchao's conversion imports it, compiled or not: a third of a second.
    import torchao.float8  # noqa: F401
gc.freeze()
