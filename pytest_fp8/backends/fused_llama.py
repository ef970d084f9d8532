"""A Llama decoder with fused projections: q, k and v are one Linear, gate and up another; the numbers stay the same.

Only the products are fused. All else is transformers' own LlamaAttention and LlamaMLP, whose projections take their
rows of the fused ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from pytest_fp8.backends.base import PARTS
from pytest_fp8.backends.linears import SKIPPED
from pytest_fp8.said import Told

FUSED = {
    "LlamaAttention": ("qkv_proj", "q_proj", "k_proj", "v_proj"),
    "LlamaMLP": ("gate_up_proj", "gate_proj", "up_proj"),
}
"""A class of transformers' -> the fused projection that its modules get, and those that it takes the place of, in the
order in which these are called with one input. Its rows are in this order."""


class Part(nn.Module):
    """In the place of a projection: its rows of what the fused one gives. The first one calls that."""

    owner: Any

    def __init__(self, owner: nn.Module, fused: str, rows: Sequence[int]) -> None:
        super().__init__()
        # No submodule of this one.
        vars(self)["owner"] = owner
        self.fused, self.rows = fused, rows
        """Name of the fused projection, and the rows of all its parts; of all but the first part none."""

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        if self.rows:
            self.owner.made = list(getattr(self.owner, self.fused)(given).split(self.rows, dim=-1))
        return self.owner.made.pop(0)  # type: ignore[no-any-return]


class NothingToFuse(Told, TypeError):
    """The model is not a decoder that this module can fuse."""


def fuse(model: nn.Module) -> None:
    """Fuse the projections of each decoder layer, in place.

    Raises :class:`NothingToFuse`, and leaves the model unchanged, where it has no layer of transformers' Llama or one
    whose projections are not plain Linears.
    """
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

    found = {name: module for name, module in model.named_modules() if type(module) in (LlamaAttention, LlamaMLP)}
    plain = {f"{n}.{part}": getattr(m, part) for n, m in found.items() for part in FUSED[type(m).__name__][1:]}
    odd = [name for name, piece in plain.items() if type(piece) is not nn.Linear or getattr(piece, SKIPPED, None)]
    if odd or not found:
        what = (
            f"{odd[0]} is no plain Linear, or is to stay in high precision" if odd else "no LlamaAttention, no LlamaMLP"
        )
        raise NothingToFuse(f"{type(model).__name__}: {what}")
    for module in found.values():
        fused, *parts = FUSED[type(module).__name__]
        pieces = {part: getattr(module, part) for part in parts}
        setattr(module, fused, fused_linear(pieces))
        for part in parts:
            rows = [piece.out_features for piece in pieces.values()] if part == parts[0] else []
            setattr(module, part, Part(module, fused, rows))


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
