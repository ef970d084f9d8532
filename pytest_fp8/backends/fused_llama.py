"""A Llama decoder with fused projections: q, k and v are one Linear, gate and up another; the numbers stay the same.

Only the products are fused. Rotary embedding and attention are transformers' own, called as its LlamaAttention calls
them, so that a fused model's attention runs on the kernels of the plain one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from pytest_fp8.backends.base import PARTS
from pytest_fp8.backends.linears import SKIPPED, put_in_place
from pytest_fp8.said import Told


class FusedAttention(nn.Module):
    """Grouped-query attention with one projection for q, k and v: its rows are q's, then k's, then v's."""

    parts = ("q_proj", "k_proj", "v_proj")

    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.config: Any = plain.config
        self.head_dim: int = plain.head_dim
        self.scaling: float = plain.scaling
        self.attention_dropout: float = plain.attention_dropout
        # Read by transformers' attention functions and caches.
        self.num_key_value_groups, self.is_causal = plain.num_key_value_groups, plain.is_causal
        self.layer_idx: int = plain.layer_idx
        pieces = {part: getattr(plain, part) for part in self.parts}
        self.rows = [piece.out_features for piece in pieces.values()]
        self.qkv_proj = fused_linear(pieces)
        self.o_proj = plain.o_proj

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, eager_attention_forward

        shape = hidden_states.shape[:-1]
        heads = [rows // self.head_dim for rows in self.rows]
        # Split before the transpose, so that the three gradients are concatenated in the layout of the product.
        parts = self.qkv_proj(hidden_states).view(*shape, sum(heads), self.head_dim).split(heads, dim=-2)
        query, key, value = [part.transpose(1, 2) for part in parts]
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        # Private: as transformers' own layers look it up. A public name of the configuration would replace it.
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        output, weights = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        return self.o_proj(output.reshape(*shape, -1).contiguous()), weights


class FusedMlp(nn.Module):
    """SwiGLU with one projection for gate and up: ``down(act(gate) * up)``."""

    parts = ("gate_proj", "up_proj")

    def __init__(self, plain: Any) -> None:
        super().__init__()
        pieces = {part: getattr(plain, part) for part in self.parts}
        self.rows = [piece.out_features for piece in pieces.values()]
        self.gate_up_proj = fused_linear(pieces)
        self.down_proj, self.act_fn = plain.down_proj, plain.act_fn

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(hidden_states).split(self.rows, dim=-1)
        return self.down_proj(self.act_fn(gate) * up)  # type: ignore[no-any-return]


class NothingToFuse(Told, TypeError):
    """The model is not a decoder that this module can fuse."""


def fuse(model: nn.Module) -> None:
    """Fuse the projections of each decoder layer, in place.

    Raises :class:`NothingToFuse`, and leaves the model unchanged, where it has no layer of transformers' Llama or one
    whose projections are not plain Linears.
    """
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

    fused: dict[type, type[FusedAttention | FusedMlp]] = {LlamaAttention: FusedAttention, LlamaMLP: FusedMlp}
    found = [(name, module) for name, module in model.named_modules() if type(module) in fused]
    parts = {f"{name}.{part}": getattr(module, part) for name, module in found for part in fused[type(module)].parts}
    odd = [name for name, piece in parts.items() if type(piece) is not nn.Linear or getattr(piece, SKIPPED, None)]
    if odd or not found:
        what = (
            f"{odd[0]} is no plain Linear, or is to stay in high precision" if odd else "no LlamaAttention, no LlamaMLP"
        )
        raise NothingToFuse(f"{type(model).__name__}: {what}")
    put_in_place(model, {module: fused[type(module)](module) for _, module in found})


def fused_linear(pieces: Mapping[str, nn.Linear]) -> nn.Linear:
    """One Linear whose rows are those of ``pieces``, by name, in order; the pieces take the same input."""
    linears, rows, end = list(pieces.values()), [], 0
    for name, piece in pieces.items():
        rows.append((name, slice(end, end + piece.out_features)))
        end += piece.out_features
    first = linears[0]
    # No memory for weights that are replaced at once.
    fused = nn.Linear(first.in_features, end, bias=first.bias is not None, dtype=first.weight.dtype, device="meta")
    for kind, _ in list(first.named_parameters()):
        parts = [getattr(piece, kind) for piece in linears]
        whole = torch.cat([part.detach() for part in parts])
        parameter = nn.Parameter(whole, requires_grad=all(part.requires_grad for part in parts))
        setattr(parameter, PARTS, rows)
        setattr(fused, kind, parameter)
    return fused
