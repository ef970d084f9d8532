"""The reference: plain PyTorch in bfloat16, nothing converted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_fp8.backends.base import Backend, Conversion
from pytest_fp8.backends.linears import linears
from pytest_fp8.recipes import Reason, Stays

if TYPE_CHECKING:
    import torch


class Bf16(Backend):
    """Keeps every Linear as it is."""

    name = "bf16"
    token_multiple = 1

    def convert(self, model: torch.nn.Module, recipe: str, emulated: bool) -> Conversion:
        return Conversion(skipped=dict.fromkeys(linears(model), Reason(Stays.REFERENCE, "this arm is BF16")))

    def is_fp8_layer(self, module: torch.nn.Module) -> bool:
        return False

    def recipe_in_force(self, module: torch.nn.Module) -> dict[str, Any]:
        return {"recipe": "off"}
