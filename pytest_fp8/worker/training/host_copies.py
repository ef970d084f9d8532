"""Copies of a GPU's tensors in the host's memory, through a page-locked buffer."""

from __future__ import annotations

from collections.abc import Mapping

import torch

STAGE_BYTES = 1 << 26
"""Of the page-locked buffer."""


def on_host(tensors: Mapping[str, torch.Tensor], device: str = "cuda") -> dict[str, torch.Tensor]:
    """The same values in the host's memory; those that are not on the ``device``, shards, and what else is more than
    its bytes, as they are.

    They go through a small page-locked buffer, and several cores then copy it on. Left to the driver, one core copies
    into pages that are new to it, 38 times slower: docs/findings.md, "What an arm's own work takes"."""
    stage: torch.Tensor | None = None
    found = dict(tensors)
    for name, tensor in tensors.items():
        if tensor.device.type == device and is_plain(tensor):
            stage = _stage(device) if stage is None else stage
            found[name] = staged(tensor, stage)
    return found


def staged(tensor: torch.Tensor, stage: torch.Tensor) -> torch.Tensor:
    """A copy in the host's memory, made part by part through ``stage``: bytes."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    # A single element is contiguous at any stride, but for this view.
    source = flat.as_strided(flat.shape, (1,)).view(torch.uint8)
    copy = torch.empty(source.shape, dtype=torch.uint8)
    for part, target in zip(source.split(stage.numel()), copy.split(stage.numel()), strict=True):
        through = stage[: part.numel()]
        through.copy_(part)
        target.copy_(through)
    return copy.view(tensor.dtype).reshape(tensor.shape)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether its bytes are its values."""
    of_no_class = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return of_no_class and tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized)


def _stage(device: str) -> torch.Tensor:
    return torch.empty(STAGE_BYTES, dtype=torch.uint8, pin_memory=device == "cuda")
