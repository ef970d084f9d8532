"""Unsloth's 16-bit LoRA model, given to ``Accelerator.prepare`` over Transformer Engine."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from pytest_fp8.backends.accelerate import AccelerateTransformerEngine
from pytest_fp8.backends.base import MakeOptimizer, Prepared
from pytest_fp8.backends.unsloth import UnslothBf16, language_model_loss

if TYPE_CHECKING:
    import torch

    from pytest_fp8.case import Case


class UnslothTransformerEngine(AccelerateTransformerEngine, UnslothBf16):
    """Unsloth's model, adapters and loss; the layers and the precision are Accelerate's and Transformer Engine's.

    Unsloth compiles its own blocks, te.Linear inside them included, as it does for users who combine the two.
    """

    name = "unsloth_te"
    short = "unsloth.te"
    recipes = AccelerateTransformerEngine.recipes
    parallel = ()
    requires = MappingProxyType({**UnslothBf16.requires, **AccelerateTransformerEngine.requires})
    reference = "unsloth_bf16"
    over_bf16 = 1.0

    def usable(self, recipe: str, emulated: bool) -> tuple[bool, str]:
        usable, why = UnslothBf16.usable(self, recipe, emulated)
        return super().usable(recipe, emulated) if usable else (usable, why)

    def import_library(self) -> None:
        # First, because it patches other libraries and must find them unchanged.
        UnslothBf16.import_library(self)
        super().import_library()

    def prepare(self, model: torch.nn.Module, make_optimizer: MakeOptimizer, case: Case, compiled: bool) -> Prepared:
        prepared = super().prepare(model, make_optimizer, case, compiled=False)
        prepared.loss_of = language_model_loss
        return prepared
