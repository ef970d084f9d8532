"""A model's tensors: digests of their values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pytest_fp8.worker.state.shards import full


def digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """A content digest of each tensor: equal bits give equal numbers on any device. It depends on the positions of the
    elements; modulo 2^64."""
    result = {}
    for name, tensor in tensors.items():
        flat = full(tensor).detach().resolve_conj().resolve_neg().reshape(-1).contiguous()
        # Of 8 bytes at once, sign bits would fall out of the sum.
        whole = flat.view({1: torch.uint8, 2: torch.int16}.get(flat.element_size(), torch.int32))
        total = 0
        for start in range(0, whole.numel(), 1 << 24):
            part = whole[start : start + (1 << 24)].to(torch.int64)
            weight = torch.arange(start + 1, start + 1 + part.numel(), device=part.device) % 65_521 + 1
            total = (total + int((part * weight).sum())) % (1 << 64)
        result[name] = total
    return result


def foreign(model: torch.nn.Module, optimizer: Any) -> list[torch.Tensor]:
    """The parameters that the optimizer steps and the model does not have: master copies, or another model's."""
    own = {id(parameter) for parameter in model.parameters()}
    return [each for group in optimizer.param_groups for each in group["params"] if id(each) not in own]
