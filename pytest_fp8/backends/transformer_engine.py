"""NVIDIA Transformer Engine: te.Linear in place of nn.Linear, and te.autocast around the forward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from pytest_fp8.backends.base import Backend, Conversion
from pytest_fp8.backends.linears import linears, plan, put_in_place
from pytest_fp8.casts import GRADIENT, INPUT, WEIGHT
from pytest_fp8.environ import variables
from pytest_fp8.said import Told

if TYPE_CHECKING:
    import torch

RECIPE_CLASSES = {
    "delayed": "DelayedScaling",
    "current": "Float8CurrentScaling",
    "block": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
}
"""Recipe -> its class in ``transformer_engine.common.recipe``."""


TRUST = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"
"""Without it Transformer Engine 2.20 refuses to load delayed scaling's state, since it unpickles that."""


class RecomputedOutsideError(Told, RuntimeError):
    """Activation checkpointing ran another forward pass the second time than the first."""


class TransformerEngine(Backend):
    """Each converted Linear becomes a te.Linear of the same name that holds the same parameters."""

    name = "transformer_engine"
    distribution = "transformer-engine"
    minimum_version = "2.9"

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

    def convert(self, model: torch.nn.Module, recipe: str, emulated: bool) -> Conversion:
        layer = linear_type(recipe)
        result, before = plan(model), linears(model)
        replaced: dict[torch.nn.Module, torch.nn.Module] = {}
        for name in result.converted:
            linear = before[name]
            replacement = _without_weights(layer, linear, linear.bias is not None)
            replacement.weight = linear.weight
            if linear.bias is not None:
                replacement.bias = linear.bias
            replaced[linear] = replacement
        result.model = put_in_place(model, replaced)
        return result

    def precision(self, recipe: str, options: Mapping[str, Any]) -> Callable[[], AbstractContextManager[Any]]:
        import transformer_engine.pytorch as te

        made = te_recipe(recipe, options)
        return lambda: te.autocast(enabled=True, recipe=made)

    def recompute_function(self) -> Callable[..., Any] | None:
        """``te.checkpoint`` opens ``te.autocast`` again in the backward pass, with the scales of the first call."""
        import transformer_engine.pytorch as te

        return partial(te.checkpoint, use_reentrant=False)

    def drop_pending_recomputation(self) -> None:
        """te.checkpoint queues the scales of each forward pass for its recomputation. Where that recomputation never
        comes, every later one would take the scales of the pass before."""
        from transformer_engine.pytorch.distributed import activation_recompute_forward
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager

        state = getattr(FP8GlobalStateManager, "quantization_state", FP8GlobalStateManager)
        for queue in getattr(state, "fp8_tensors_recompute_buffer", ()):
            queue.clear()
        getattr(activation_recompute_forward, "_is_first_fp8_module", []).clear()

    def raise_explained(self, error: Exception) -> None:
        from torch.utils.checkpoint import CheckpointError

        if isinstance(error, CheckpointError):
            raise RecomputedOutsideError(str(error).partition("Tip:")[0].strip()) from error

    def is_fp8_layer(self, module: torch.nn.Module) -> bool:
        from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

        return isinstance(module, TransformerEngineBaseModule)

    def recipe_in_force(self, module: torch.nn.Module) -> dict[str, Any]:
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager

        if not FP8GlobalStateManager.is_fp8_enabled():
            return {"recipe": "off"}
        return describe_recipe(FP8GlobalStateManager.get_fp8_recipe())

    def reset_scaling(self, model: torch.nn.Module) -> None:
        for module in model.modules():
            # Only delayed scaling keeps state between steps.
            state = getattr(module, "fp8_meta", {}).get("scaling_fwd")
            if self.is_fp8_layer(module) and hasattr(state, "amax_history"):
                cast(Any, module).reset_fp8_meta_tensors()

    def amax_history(self, module: torch.nn.Module) -> list[float] | None:
        """The history's rows of earlier steps; row 0 collects the running step. ``None`` without another row."""
        history = getattr(getattr(module, "fp8_meta", {}).get("scaling_fwd"), "amax_history", None)
        if history is None or history.shape[0] < 2:
            return None
        return [float(value) for value in history[1:].reshape(-1).tolist()]

    def calibration_passes(self, recipe: str) -> int:
        """Two passes fill delayed scaling's histories: docs/findings.md, "Delayed scaling starts without a history"."""
        return 2 if recipe == "delayed" else 0

    def is_scaling_state(self, key: str) -> bool:
        return key.endswith("._extra_state")

    def scaling_tensors(self, module: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Of delayed scaling: the scales, and the largest magnitudes that they are made of."""
        states = {key: getattr(module, "fp8_meta", {}).get(key) for key in ("scaling_fwd", "scaling_bwd")}
        return {
            f"{key} {name}": getattr(state, name)
            for key, state in states.items()
            if hasattr(state, "amax_history")
            for name in ("scale", "amax_history")
        }

    def operand_scales(self, module: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Of delayed scaling, by the positions of ``FP8FwdTensorIdx`` and ``FP8BwdTensorIdx`` (its constants.py)."""
        meta = getattr(module, "fp8_meta", {})
        places = {INPUT: ("scaling_fwd", 0), WEIGHT: ("scaling_fwd", 1), GRADIENT: ("scaling_bwd", 0)}
        states = {operand: (meta.get(key), index) for operand, (key, index) in places.items()}
        return {
            operand: cast(Any, state).scale[index].clone()
            for operand, (state, index) in states.items()
            if hasattr(state, "amax_history")
        }

    def new_layer(self, module: torch.nn.Module) -> Any:
        import transformer_engine.pytorch as te

        return _without_weights(type(module), module, module.use_bias) if isinstance(module, te.Linear) else None

    def trusting_scaling_state(self) -> AbstractContextManager[None]:
        return variables({TRUST: "1"})


def _without_weights(kind: Any, like: Any, bias: bool) -> Any:
    """A layer of this kind with a Linear's sizes and dtype, without memory for weights."""
    return kind(like.in_features, like.out_features, bias=bias, params_dtype=like.weight.dtype, device="meta")


def linear_type(recipe: str) -> Any:
    """The class to convert to: te.Linear, or for delayed scaling a te.Linear that ``torch.compile`` runs uncompiled.

    Delayed scaling keeps state that Transformer Engine's compiled operator cannot carry. One class for all layers, so
    that the graph break is compiled once.
    """
    import torch
    import transformer_engine.pytorch as te

    if recipe != "delayed":
        return te.Linear

    class UncompiledLinear(te.Linear):  # type: ignore[misc]
        forward = torch.compiler.disable(te.Linear.forward)

    return UncompiledLinear


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
