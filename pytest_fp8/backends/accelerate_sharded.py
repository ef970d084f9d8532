"""The reference of Accelerate's FSDP2: the same plugin and master weights in float32, nothing converted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_fp8.backends.accelerate import MINIMUM, on_cpu
from pytest_fp8.backends.accelerate_state import forget_accelerate, sharded_accelerator
from pytest_fp8.backends.base import MakeOptimizer, Prepared
from pytest_fp8.backends.bf16 import Bf16

if TYPE_CHECKING:
    import torch

    from pytest_fp8.case import Case


class AccelerateBf16(Bf16):
    """``Accelerator(mixed_precision="bf16", fsdp_plugin=...)``."""

    name = "accelerate_bf16"
    distribution = "accelerate"
    minimum_version = MINIMUM
    keeps_state = True

    def import_library(self) -> None:
        import accelerate  # noqa: F401

    def prepare(self, model: torch.nn.Module, make_optimizer: MakeOptimizer, case: Case, compiled: bool) -> Prepared:
        forget_accelerate()
        accelerator = sharded_accelerator(on_cpu(model), "bf16", [])
        conversion = self.convert(model, case.recipe, case.emulated)
        model, optimizer = accelerator.prepare(model, make_optimizer(model))
        return Prepared(model, conversion, optimizer, backward=accelerator.backward)
