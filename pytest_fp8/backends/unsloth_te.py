"""Accelerate over Transformer Engine on a model of Unsloth's: 16-bit LoRA, given to ``Accelerator.prepare``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from pytest_fp8.backends.accelerate import AccelerateTransformerEngine
from pytest_fp8.backends.base import Backend, Prepared
from pytest_fp8.backends.unsloth import UnslothBf16, language_model_loss

if TYPE_CHECKING:
    import torch

    from pytest_fp8.cases import Case


class UnslothTransformerEngine(UnslothBf16):
    """Unsloth's model, adapters and loss; the layers and the precision are Accelerate's and Transformer Engine's.

    Unsloth compiles its own blocks and is left to meet te.Linear there, as it does for users who combine the two.
    """

    name = "unsloth_te"
    token_multiple = Backend.token_multiple
    keeps_state = True

    def __init__(self) -> None:
        self._road = AccelerateTransformerEngine()

    def available(self) -> tuple[bool, str]:
        there, what = super().available()
        road, said = self._road.available()
        return there and road, f"{what} and {said}" if there and road else what if not there else said

    def usable(self, recipe: str, emulated: bool) -> tuple[bool, str]:
        usable, why = super().usable(recipe, emulated)
        return self._road.usable(recipe, emulated) if usable else (usable, why)

    def import_library(self) -> None:
        super().import_library()
        self._road.import_library()

    def prepare(
        self,
        model: torch.nn.Module,
        make_optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer],
        case: Case,
        compiled: bool,
    ) -> Prepared:
        prepared = self._road.prepare(model, make_optimizer, case, compiled=False)
        prepared.loss_of = language_model_loss
        return prepared

    def precision(self, recipe: str, options: Mapping[str, Any]) -> Callable[[], AbstractContextManager[Any]]:
        return self._road.precision(recipe, options)

    def is_fp8_layer(self, module: torch.nn.Module) -> bool:
        return self._road.is_fp8_layer(module)

    def recipe_in_force(self, module: torch.nn.Module) -> dict[str, Any]:
        return self._road.recipe_in_force(module)

    def reset(self, model: torch.nn.Module) -> None:
        self._road.reset(model)

    def amax_history(self, module: torch.nn.Module) -> list[float] | None:
        return self._road.amax_history(module)

    def calibration_passes(self, recipe: str) -> int:
        return self._road.calibration_passes(recipe)

    def scaling_state(self, key: str) -> bool:
        return self._road.scaling_state(key)
