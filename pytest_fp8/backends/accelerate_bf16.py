"""The reference of Accelerate on several GPUs: the same plugin and master weights, nothing converted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_fp8.backends.accelerate import ACCELERATE, on_cpu, prepared_by
from pytest_fp8.backends.accelerate_state import forget_accelerate, make_accelerator
from pytest_fp8.backends.base import MakeOptimizer, Prepared
from pytest_fp8.backends.bf16 import Bf16

if TYPE_CHECKING:
    import torch

    from pytest_fp8.case import Case


class AccelerateBf16(Bf16):
    """``Accelerator(mixed_precision="bf16")``, with the plugin that the FP8 arm has."""

    name = "accelerate_bf16"
    short = "accelerate.bf16"
    requires = ACCELERATE
    parallel = ("ddp", "fsdp2", "zero3")
    reference_on_ranks = "accelerate_bf16"
    through_accelerate = True

    def import_library(self) -> None:
        import accelerate  # noqa: F401

    def prepare(self, model: torch.nn.Module, make_optimizer: MakeOptimizer, case: Case, compiled: bool) -> Prepared:
        forget_accelerate()
        accelerator = make_accelerator(case.parallel, on_cpu(model), "bf16", [])
        conversion = self.convert(model, case)
        return prepared_by(accelerator, model, make_optimizer(model), conversion)
