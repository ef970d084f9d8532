"""The sound workloads, all of them."""

from __future__ import annotations

from benchmarks.healthy import (  # noqa: F401
    attention,
    batches,
    experts,
    fields,
    habits,
    huggingface,
    layers,
    loops,
    objectives,
    optimizers,
    own_fp8,
    recurrent,
    users,
    vision,
)
from benchmarks.healthy.sound import CATALOGUE

__all__ = ["CATALOGUE"]
