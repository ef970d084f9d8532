"""A decoder in Transformer Engine's own layers: joined projections as te.Linear, and te.RMSNorm.

The norms stay layers of their own. te.LayerNormLinear would take them into the next product, and has its price:
``torch.compile`` always steps around it, where te.Linear is traced, and its input is no longer the product's operand,
by which each FP8 layer is checked against high precision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pytest_fp8.backends.base import Conversion, Prepared, put_in_place
from pytest_fp8.backends.transformer_engine import TransformerEngine

if TYPE_CHECKING:
    import torch

    from pytest_fp8.case import Case


class FusedTransformerEngine(TransformerEngine):
    """Three of seven Linears fewer in each block: q, k and v are one, gate and up another."""

    name = "te_fused"

    def convert(self, model: torch.nn.Module, recipe: str, options: Mapping[str, Any], emulated: bool) -> Conversion:
        from pytest_fp8.zoo.fused import fuse

        fuse(model)
        replace_norms(model)
        return super().convert(model, recipe, options, emulated)

    def prepare(
        self,
        model: torch.nn.Module,
        make_optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer],
        case: Case,
        compiled: bool,
    ) -> Prepared:
        conversion = self.convert(model, case.recipe, case.full_options, case.emulated)
        modules: dict[str, Any] = dict(model.named_modules())
        names = [name for name in modules if name in {*conversion.converted, *conversion.skipped}]
        layers = {name: (modules[name].in_features, modules[name].out_features) for name in names}
        return Prepared(model, conversion, layers=layers)

    def joined(self, model: torch.nn.Module) -> Mapping[str, Sequence[tuple[str, slice]]]:
        from pytest_fp8.zoo.fused import parts_of

        return dict(parts_of(model))


def replace_norms(model: torch.nn.Module) -> None:
    """te.RMSNorm in place of each LlamaRMSNorm: its weight and its epsilon move over."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    layer = norm_type()
    replaced: dict[torch.nn.Module, torch.nn.Module] = {}
    norms: list[Any] = [module for module in model.modules() if type(module) is LlamaRMSNorm]
    for norm in norms:
        replaced[norm] = layer(norm.weight.shape[0], eps=norm.variance_epsilon, dtype=norm.weight.dtype, device="meta")
        replaced[norm].weight = norm.weight
    put_in_place(model, replaced)


def norm_type() -> Any:
    """te.RMSNorm that ``torch.compile`` steps around, whatever the recipe.

    It is one of Transformer Engine's fusible operations: each call builds a fuser, an autograd function takes that for
    an argument, and the kernel behind it is no torch operator, so that there is nothing to trace.
    """
    import torch
    import transformer_engine.pytorch as te

    class SteppedAroundRMSNorm(te.RMSNorm):  # type: ignore[misc]
        forward = torch.compiler.disable(te.RMSNorm.forward)

    return SteppedAroundRMSNorm
