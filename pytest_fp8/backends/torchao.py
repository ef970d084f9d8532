"""torchao's Float8Linear: dynamic scaling, meant to be compiled. Its numerics also run emulated on a CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pytest_fp8.backends.base import ALIGNMENT, Backend, Conversion
from pytest_fp8.backends.linears import linears, plan, put_in_place, weight_of
from pytest_fp8.recipes import DGRAD, FPROP, PARALLEL, POWERS, RecipeFacts, Rule

if TYPE_CHECKING:
    import torch

    from pytest_fp8.case import Case

ALL_GATHER, PRECOMPUTE = "float8_all_gather", "precompute_scale"
ALL_GATHER_FIELD = "enable_fsdp_float8_all_gather"
_RECIPE_FIELDS = (
    "cast_config_input",
    "cast_config_input_for_grad_weight",
    "cast_config_weight",
    "cast_config_weight_for_grad_input",
    "cast_config_grad_output",
    "cast_config_grad_output_for_grad_weight",
)
"""The fields of torchao's configuration that make up a recipe, beside the rounding of its scales."""


class TorchAO(Backend):
    """``convert_to_float8_training`` with a filter that gives a reason for each Linear it skips."""

    name = "torchao"
    recipes: Sequence[RecipeFacts] = (
        # Weights are gathered in FP8 under FSDP2; torchao has it for scales of whole tensors alone.
        RecipeFacts("tensorwise", switches=(ALL_GATHER, PRECOMPUTE, POWERS)),
        RecipeFacts("rowwise", minimum_capability=(9, 0)),
        # "gw_hp": the weight gradient stays in high precision, by design.
        RecipeFacts("rowwise_with_gw_hp", roles=(FPROP, DGRAD), minimum_capability=(9, 0)),
    )
    requires: Mapping[str, str] = MappingProxyType({"torchao": "0.14"})
    emulates = True
    parallel: Sequence[str] = PARALLEL
    rules = (
        Rule(
            lambda case: not case.options.get(ALL_GATHER) or case.parallel in ("fsdp2", "own"),
            ALL_GATHER,
            "FSDP2, whose gathers it casts: parallel='fsdp2' or 'own'",
        ),
        Rule(
            lambda case: not case.options.get(PRECOMPUTE) or case.options.get(ALL_GATHER),
            PRECOMPUTE,
            f"{ALL_GATHER}, whose scales it computes at once",
        ),
    )
    _precomputes = False

    def import_library(self) -> None:
        import torchao.float8  # noqa: F401

    def stepped(self, model: torch.nn.Module) -> None:
        """Scales of all weights at once, as torchao advises after each step of the optimizer. Without it the gather of
        each weight reduces its largest magnitude by itself."""
        if self._precomputes:
            from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

            precompute_float8_dynamic_scale_for_fsdp(model)

    def convert(self, model: torch.nn.Module, case: Case) -> Conversion:
        from torchao.float8 import convert_to_float8_training

        fields = {ALL_GATHER_FIELD: case.options.get(ALL_GATHER, False)}
        if case.options.get(POWERS):
            fields[POWERS] = True
        config = torchao_config(case.recipe, case.emulated, **fields)
        self._precomputes = bool(case.options.get(PRECOMPUTE))
        result = plan(model)
        before = linears(model)
        wanted = {name: before[name] for name in result.converted}
        model = convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name in wanted)
        # A Linear that two blocks share: the filter knows its first name only, so torchao replaces it in that place.
        after = linears(model)
        put_in_place(model, {linear: after[name] for name, linear in wanted.items()})
        result.model = model
        return result

    def is_fp8_layer(self, module: torch.nn.Module) -> bool:
        from torchao.float8.float8_linear import Float8Linear

        return isinstance(module, Float8Linear) or _wrapped_by(module) is not None

    def row_multiple(self, layer: torch.nn.Module) -> int:
        # Emulated it pads nothing, and on a GPU what it multiplies along, which of the weight gradient is the rows.
        config = getattr(layer, "config", None)
        return 1 if getattr(config, "pad_inner_dim", False) else ALIGNMENT

    def _switches(self, config: Any) -> dict[str, Any]:
        on = {ALL_GATHER: config.enable_fsdp_float8_all_gather, PRECOMPUTE: self._precomputes}
        return {name: True for name, value in on.items() if value}

    def recipe_in_force(self, module: torch.nn.Module) -> dict[str, Any]:
        if wrapper := _wrapped_by(module):
            return {"recipe": wrapper.float8_linear_recipe}
        config = getattr(module, "config", None)
        if config is None:
            return {"recipe": "off"}
        for facts in TorchAO.recipes:
            known = torchao_config(facts.name, emulated=False)
            if any(getattr(config, part) != getattr(known, part) for part in _RECIPE_FIELDS):
                continue
            powers, usual = getattr(config, POWERS), getattr(known, POWERS)
            if powers == usual or POWERS in facts.switches:
                return {"recipe": facts.name, **self._switches(config), **({POWERS: True} if powers != usual else {})}
        return {"recipe": "custom"}


def _wrapped_by(module: torch.nn.Module) -> Any:
    """The configuration of a weight that multiplies in FP8 whatever layer holds it (``Float8TrainingOpConfig``); else
    ``None``."""
    config = getattr(weight_of(module), "config", None)
    return config if hasattr(config, "float8_linear_recipe") else None


def torchao_config(recipe: str, emulated: bool, **options: bool) -> Any:
    """The library's configuration of a recipe, with its FP8 products computed in high precision where ``emulated``.
    ``options``: further fields of it."""
    from dataclasses import replace

    from torchao.float8 import Float8LinearConfig

    # replace() runs the configuration's __post_init__ again, which leaves the recipe's fields as they are.
    return replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulated, **options)
