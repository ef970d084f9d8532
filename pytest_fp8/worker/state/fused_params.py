"""The plain model's names for a live model's tensors: wrappers' prefixes removed, fused parameters split.

A fused layer keeps q, k and v as rows of one weight. Under the plain names it is three views of that weight, which are
saved, loaded and compared like any other weights without a copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from pytest_fp8.backends.base import FusedParams


def plain_name(name: str) -> str:
    """A name without the prefixes that wrappers inside the model add: torch.compile, activation checkpointing.

    >>> plain_name("_orig_mod.layers.0._orig_mod.weight")
    'layers.0.weight'
    """
    return ".".join(part for part in name.split(".") if part not in ("_orig_mod", "_checkpoint_wrapped_module"))


def split(tensors: Iterable[tuple[str, Any]], fused: FusedParams) -> Iterator[tuple[str, Any]]:
    """(plain name, tensor) for each (live name, tensor); the parts of a fused parameter are views of it."""
    for name, tensor in tensors:
        for part, rows in _parts(name, fused):
            if rows is None:
                yield part, tensor
            else:
                # A scalar, such as an optimizer's step count, is copied for each part: safetensors refuses shared
                # memory.
                yield part, tensor[rows] if tensor.dim() else tensor.clone()


def join(parts: Mapping[str, Any], fused: FusedParams) -> dict[str, Any]:
    """The tensors by live names, from those by plain names. What is no tensor is the same for each part."""
    found = dict(parts)
    whole: dict[str, Any] = {}
    for name, pieces in fused.items():
        taken = [found.pop(part) for part, _ in pieces if part in found]
        if taken:
            whole[name] = torch.cat(taken) if isinstance(taken[0], torch.Tensor) and taken[0].dim() else taken[0]
    return {**found, **whole}


def _parts(name: str, fused: FusedParams) -> Sequence[tuple[str, slice | None]]:
    """(plain name, rows) of each part of a live parameter; of one that is not fused, its name and no rows."""
    return fused.get(name, ((name, None),))


def trained(model: torch.nn.Module, optimizer: Any, fused: FusedParams) -> list[str]:
    """Plain names of the parameters that the optimizer steps; a tied parameter counts under each of its names."""
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    live = model.named_parameters(remove_duplicate=False)
    return sorted(plain_name(part) for name, value in live if id(value) in stepped for part, _ in _parts(name, fused))
