"""Keeps activations in the host's memory, for an uncompiled step whose activations do not fit the GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes


def kept_on_host() -> torch.autograd.graph.saved_tensors_hooks:
    """A context in which large activations wait in the host's memory for the backward pass.

    Compiled, an 8B model's activations for 4096 tokens fit beside its weights on 80 GB; uncompiled they take 40 GiB.
    Tensors of a class of their own (a library's FP8 tensors) stay where they are. Nothing of it is seen by those who
    watch operators.
    """
    return torch.autograd.graph.saved_tensors_hooks(_to_host, _back)


def _to_host(tensor: torch.Tensor) -> Any:
    plain = type(tensor) is torch.Tensor and tensor.is_cuda and tensor.numel() >= 1 << 20
    if not plain:
        return tensor
    with _disable_current_modes(), torch.no_grad():
        return tensor.device, tensor.to("cpu")


def _back(packed: Any) -> torch.Tensor:
    if isinstance(packed, torch.Tensor):
        return packed
    device, tensor = packed
    with _disable_current_modes(), torch.no_grad():
        return tensor.to(device)  # type: ignore[no-any-return]
