"""The sound workloads, all of them."""

from __future__ import annotations

from benchmarks.healthy import (  # noqa: F401
    batches,
    habits,
    huggingface,
    optimizers,
    own_fp8,
    sequences,
    structures,
    training,
    vision,
)
from benchmarks.healthy.sound import CATALOGUE

__all__ = ["CATALOGUE"]
