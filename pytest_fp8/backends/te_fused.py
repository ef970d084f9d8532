"""A decoder in Transformer Engine's own layers: fused projections as te.Linear, and te.RMSNorm.

The norms stay layers of their own. te.LayerNormLinear would fuse them with the next product, at a price:
``torch.compile`` never traces it, as it traces te.Linear, and its input is no longer the product's operand, with which
each FP8 layer is checked against high precision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_fp8.backends.base import Conversion
from pytest_fp8.backends.linears import put_in_place
from pytest_fp8.backends.transformer_engine import RECIPES, TransformerEngine, uncompiled

if TYPE_CHECKING:
    import torch

    from pytest_fp8.case import Case


class FusedTransformerEngine(TransformerEngine):
    """Four Linears in each block in place of seven: q, k and v are one, gate and up another."""

    name = "te_fused"
    short = "te.fused"
    library = "transformer_engine"
    recipes = RECIPES
    parallel = ()
    other_modules = True

    def convert(self, model: torch.nn.Module, case: Case) -> Conversion:
        from pytest_fp8.backends.fused_llama import fuse

        fuse(model)
        replace_norms(model)
        conversion = super().convert(model, case)
        modules: dict[str, Any] = dict(model.named_modules())
        names = [name for name in modules if name in {*conversion.converted, *conversion.skipped}]
        conversion.layers = {name: (modules[name].in_features, modules[name].out_features) for name in names}
        return conversion


def replace_norms(model: torch.nn.Module) -> None:
    """Put a te.RMSNorm with the same weight and epsilon in place of each LlamaRMSNorm.

    Uncompiled with every recipe: it is one of Transformer Engine's fusible operations. Each call builds a fuser and
    passes it to an autograd function, and the kernel behind it is no torch operator, so there is nothing to trace.
    """
    import transformer_engine.pytorch as te
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    layer = uncompiled(te.RMSNorm)
    replaced: dict[torch.nn.Module, torch.nn.Module] = {}
    norms: list[Any] = [module for module in model.modules() if type(module) is LlamaRMSNorm]
    for norm in norms:
        replaced[norm] = layer(norm.weight.shape[0], eps=norm.variance_epsilon, dtype=norm.weight.dtype, device="meta")
        replaced[norm].weight = norm.weight
    put_in_place(model, replaced)
