"""torchao's Float8Linear: dynamic scaling, meant to be compiled; its numerics also run emulated on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pytest_fp8.backends.base import Backend, Conversion, plan

if TYPE_CHECKING:
    import torch


class TorchAO(Backend):
    """``convert_to_float8_training`` with a filter that says why it leaves a Linear alone."""

    name = "torchao"
    distribution = "torchao"
    minimum_version = "0.14"

    def import_library(self) -> None:
        import torchao.float8  # noqa: F401

    def usable(self, recipe: str, emulated: bool) -> tuple[bool, str]:
        import torch
        from torchao.float8 import Float8LinearConfig

        try:
            Float8LinearConfig.from_recipe_name(recipe)
        except AssertionError as error:
            return False, f"torchao: {error}"
        if emulated:
            return True, ""
        capability = torch.cuda.get_device_capability()
        if capability < (8, 9):
            return False, f"torch._scaled_mm needs compute capability 8.9; this GPU has {capability[0]}.{capability[1]}"
        return True, ""

    def convert(self, model: torch.nn.Module, recipe: str, options: Mapping[str, Any], emulated: bool) -> Conversion:
        from dataclasses import replace

        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        # replace() runs the config's own __post_init__ again, which the recipe's fields pass unchanged.
        config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulated)
        result = plan(model)
        wanted = set(result.converted)
        convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name in wanted)
        return result

    def is_fp8_layer(self, module: torch.nn.Module) -> bool:
        from torchao.float8.float8_linear import Float8Linear

        return isinstance(module, Float8Linear)

    def recipe_in_force(self, module: torch.nn.Module) -> dict[str, Any]:
        from torchao.float8 import Float8LinearConfig

        config = getattr(module, "config", None)
        if config is None:
            return {"recipe": "off"}
        for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp"):
            known = Float8LinearConfig.from_recipe_name(recipe)
            if all(getattr(config, part) == getattr(known, part) for part in _RECIPE_FIELDS):
                return {"recipe": recipe}
        return {"recipe": "custom"}


_RECIPE_FIELDS = (
    "cast_config_input",
    "cast_config_input_for_grad_weight",
    "cast_config_weight",
    "cast_config_weight_for_grad_input",
    "cast_config_grad_output",
    "cast_config_grad_output_for_grad_weight",
    "round_scales_to_power_of_2",
)
