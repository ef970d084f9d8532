"""The reference: plain PyTorch in bfloat16, nothing converted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pytest_fp8.backends.base import Backend, Conversion
from pytest_fp8.backends.linears import linears
from pytest_fp8.recipes import NO_RECIPE, PARALLEL, Reason, RecipeFacts, Stays

if TYPE_CHECKING:
    import torch

    from pytest_fp8.case import Case


class Bf16(Backend):
    """Keeps every Linear as it is."""

    name = "bf16"
    recipes: Sequence[RecipeFacts] = (NO_RECIPE,)
    emulates = True
    parallel: Sequence[str] = PARALLEL

    def convert(self, model: torch.nn.Module, case: Case) -> Conversion:
        return Conversion(skipped=dict.fromkeys(linears(model), Reason(Stays.REFERENCE, "this arm is BF16")))

    def is_fp8_layer(self, module: torch.nn.Module) -> bool:
        return False

    def recipe_in_force(self, module: torch.nn.Module) -> dict[str, Any]:
        return {"recipe": "off"}
