"""NVIDIA Transformer Engine: te.Linear in place of nn.Linear, and te.autocast around the forward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from pytest_fp8.backends.base import Backend, Conversion, Scaling
from pytest_fp8.backends.linears import linears, plan, put_in_place
from pytest_fp8.casts import GRADIENT, INPUT, WEIGHT
from pytest_fp8.recipes import PARALLEL, RecipeFacts

if TYPE_CHECKING:
    import torch

    from pytest_fp8.case import Case

_FORMAT = {"fp8_format": "HYBRID"}
DELAYED = {**_FORMAT, "amax_history_len": 1024, "amax_compute_algo": "max", "margin": 0}
FILLED = 2
"""Passes that fill delayed scaling's histories: docs/measurements.md, "Delayed scaling starts without a history"."""
RECIPES = (
    RecipeFacts("delayed", options=DELAYED, calibration_passes=FILLED),
    RecipeFacts("current", options=_FORMAT),
    # Block scaling on Hopper needs cuBLAS's 128-wide block kernels; Blackwell offers MXFP8 instead.
    RecipeFacts("block", options={"fp8_format": "E4M3"}, only_capabilities=(9,)),
)
RECIPE_CLASSES = {
    "delayed": "DelayedScaling",
    "current": "Float8CurrentScaling",
    "block": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
}
"""Recipe -> its class in ``transformer_engine.common.recipe``."""


class TransformerEngine(Backend):
    """Each converted Linear becomes a te.Linear of the same name that holds the same parameters."""

    name = "transformer_engine"
    short = "te"
    recipes: Sequence[RecipeFacts] = (
        *RECIPES,
        RecipeFacts("mxfp8", options={"fp8_format": "E4M3"}, minimum_capability=(10, 0)),
    )
    requires: Mapping[str, str] = MappingProxyType({"transformer-engine": "2.9"})
    parallel: Sequence[str] = PARALLEL
    scaling_state = "._extra_state"

    def import_library(self) -> None:
        import transformer_engine.pytorch  # noqa: F401

    def usable(self, recipe: str, emulated: bool) -> tuple[bool, str]:
        import transformer_engine.pytorch as te

        ask = {
            "block": te.is_fp8_block_scaling_available,
            "mxfp8": te.is_mxfp8_available,
        }.get(recipe, te.is_fp8_available)
        usable, reason = ask(return_reason=True)
        return bool(usable), f"Transformer Engine: {reason}" if reason else ""

    def convert(self, model: torch.nn.Module, case: Case) -> Conversion:
        layer = linear_type(case.recipe)
        result, before = plan(model), linears(model)
        replaced: dict[torch.nn.Module, torch.nn.Module] = {}
        for name in result.converted:
            linear = before[name]
            sizes, bias = (linear.in_features, linear.out_features), linear.bias is not None
            # No memory for weights that are replaced at once.
            replacement = layer(*sizes, bias=bias, params_dtype=linear.weight.dtype, device="meta")
            replacement.weight = linear.weight
            if bias:
                replacement.bias = linear.bias
            replaced[linear] = replacement
        result.model = put_in_place(model, replaced)
        return result

    def precision(self, case: Case) -> Callable[[], AbstractContextManager[Any]]:
        import transformer_engine.pytorch as te

        made = te_recipe(case.recipe, case.full_options)
        return lambda: te.autocast(enabled=True, recipe=made)

    def recompute_function(self) -> Callable[..., Any] | None:
        """``te.checkpoint`` opens ``te.autocast`` again in the backward pass, with the scales of the first call."""
        import transformer_engine.pytorch as te

        return partial(te.checkpoint, use_reentrant=False)

    def settle(self, model: torch.nn.Module) -> None:
        """te.checkpoint queues the scales of each forward pass for its recomputation. Where that recomputation never
        comes, every later one would take the scales of the pass before."""
        from transformer_engine.pytorch.distributed import activation_recompute_forward
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager

        # Private, as the names above and below: a public way to forget a pass without recomputation would replace them.
        state = getattr(FP8GlobalStateManager, "quantization_state", FP8GlobalStateManager)
        for queue in getattr(state, "fp8_tensors_recompute_buffer", ()):
            queue.clear()
        getattr(activation_recompute_forward, "_is_first_fp8_module", []).clear()

    def is_fp8_layer(self, module: torch.nn.Module) -> bool:
        from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

        return isinstance(module, TransformerEngineBaseModule)

    def recipe_in_force(self, module: torch.nn.Module) -> dict[str, Any]:
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager

        if not FP8GlobalStateManager.is_fp8_enabled():
            return {"recipe": "off"}
        return describe_recipe(FP8GlobalStateManager.get_fp8_recipe())

    def scaling(self, layer: torch.nn.Module) -> Scaling | None:
        """Of delayed scaling, which alone keeps something. The places are those of ``FP8FwdTensorIdx`` and
        ``FP8BwdTensorIdx`` in its constants.py. Row 0 of a history collects the running step."""
        meta = getattr(layer, "fp8_meta", {})
        kept = {key: meta[key] for key in ("scaling_fwd", "scaling_bwd") if hasattr(meta.get(key), "amax_history")}
        if not kept:
            return None
        places = {INPUT: ("scaling_fwd", 0), WEIGHT: ("scaling_fwd", 1), GRADIENT: ("scaling_bwd", 0)}
        operands = {operand: kept[key].scale[place] for operand, (key, place) in places.items() if key in kept}
        history = kept["scaling_fwd"].amax_history if "scaling_fwd" in kept else None
        return Scaling(
            operands,
            history[1:] if history is not None and len(history) > 1 else None,
            reset=lambda: cast(Any, layer).reset_fp8_meta_tensors(),
        )


def linear_type(recipe: str) -> Any:
    """The class to convert to: te.Linear, for delayed scaling uncompiled, whose state Transformer Engine's compiled
    operator cannot carry."""
    import transformer_engine.pytorch as te

    return uncompiled(te.Linear) if recipe == "delayed" else te.Linear


def uncompiled(layer: Any) -> Any:
    """A class of layers that ``torch.compile`` runs as plain Python: one for all of them, so that the graph break is
    compiled once."""
    import torch

    return type(f"Uncompiled{layer.__name__}", (layer,), {"forward": torch.compiler.disable(layer.forward)})


def te_recipe(name: str, options: Mapping[str, Any]) -> Any:
    """The library's own recipe object, every option passed through."""
    from transformer_engine.common import recipe as te_recipes

    made = getattr(te_recipes, RECIPE_CLASSES[name])
    arguments = dict(options)
    arguments["fp8_format"] = getattr(te_recipes.Format, arguments["fp8_format"])
    return made(**arguments)


def describe_recipe(recipe: Any) -> dict[str, Any]:
    """A live recipe object as plain data, in the words of :mod:`pytest_fp8.recipes`."""
    kind = type(recipe).__name__
    names = {made: name for name, made in RECIPE_CLASSES.items()}
    seen: dict[str, Any] = {"recipe": names.get(kind, kind)}
    seen["fp8_format"] = recipe.fp8_format.name
    if seen["recipe"] == "delayed":
        algorithm = recipe.amax_compute_algo
        seen["amax_history_len"] = recipe.amax_history_len
        seen["amax_compute_algo"] = (
            algorithm if isinstance(algorithm, str) else getattr(algorithm, "__name__", "custom")
        )
        seen["margin"] = recipe.margin
    return seen
