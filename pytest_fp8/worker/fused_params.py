"""The plain model's names for a live model's tensors, where one parameter holds several of the plain model's.

A fused layer keeps q, k and v as rows of one weight. Under plain names it is three views of it: saved, loaded and
compared like any other weights, split and joined without a copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

Joined = Mapping[str, Sequence[tuple[str, slice]]]
"""Live parameter's name -> the plain names of its parts, with the rows each takes, in order."""


def split(tensors: Iterable[tuple[str, Any]], joined: Joined) -> Iterator[tuple[str, Any]]:
    """(plain name, tensor) for each (live name, tensor): parts of a joined one are views of it."""
    for name, tensor in tensors:
        for part, rows in _parts(name, joined):
            if rows is None:
                yield part, tensor
            else:
                # A scalar, such as an optimizer's step count, is each part's own: safetensors stores no memory twice.
                yield part, tensor[rows] if tensor.dim() else tensor.clone()


def _parts(name: str, joined: Joined) -> Sequence[tuple[str, slice | None]]:
    """Plain names of a live parameter's parts, with their rows; of one that is not joined itself, whole."""
    return joined.get(name, ((name, None),))


def trainable(model: torch.nn.Module) -> dict[str, bool]:
    """Whether each parameter takes gradients, under each of its names where it has several."""
    return {name: parameter.requires_grad for name, parameter in model.named_parameters(remove_duplicate=False)}


def trained(model: torch.nn.Module, optimizer: Any, joined: Joined) -> list[str]:
    """Plain names of the parameters that the optimizer steps, second names of tied ones included."""
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    live = model.named_parameters(remove_duplicate=False)
    return sorted(part for name, value in live if id(value) in stepped for part, _ in _parts(name, joined))


def join(parts: Mapping[str, torch.Tensor], joined: Joined) -> dict[str, torch.Tensor]:
    """The live names' tensors again, from plain names. Raises ``KeyError`` where a part is missing."""
    found = dict(parts)
    whole: dict[str, torch.Tensor] = {}
    for name, pieces in joined.items():
        taken = [found.pop(part) for part, _ in pieces]
        whole[name] = torch.cat(taken) if taken[0].dim() else taken[0]
    return {**found, **whole}
