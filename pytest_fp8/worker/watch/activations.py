"""Keeps activations in the host's memory, for an uncompiled step whose activations do not fit the GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from pytest_fp8.worker.state.host_copies import new_stage, staged

LEAST_VALUES = 1 << 20
"""Smaller tensors stay where they are."""


def kept_on_host(device: str = "cuda") -> torch.autograd.graph.saved_tensors_hooks:
    """A context in which large activations of this type of device wait in the host's memory for the backward pass.

    Compiled, an 8B model's activations for 4096 tokens fit beside its weights on 80 GB; uncompiled they take 40 GiB.
    Tensors of a class of their own (a library's FP8 tensors) stay where they are. Nothing of it is seen by those who
    watch operators. It also holds what a compiled step saves, which fits: keep it around what is watched alone.
    """
    stage: list[torch.Tensor] = []

    def to_host(tensor: torch.Tensor) -> Any:
        plain = type(tensor) is torch.Tensor and tensor.device.type == device and tensor.numel() >= LEAST_VALUES
        if not plain:
            return tensor
        with _disable_current_modes(), torch.no_grad():
            if not tensor.is_contiguous():
                # Its strides are kept: a kernel may count on them.
                return tensor.device, tensor.to("cpu", copy=True)
            if not stage:
                stage.append(new_stage(device))
            return tensor.device, staged(tensor, stage[0])

    return torch.autograd.graph.saved_tensors_hooks(to_host, _back)


def _back(packed: Any) -> torch.Tensor:
    if isinstance(packed, torch.Tensor):
        return packed
    device, tensor = packed
    with _disable_current_modes(), torch.no_grad():
        return tensor.to(device)  # type: ignore[no-any-return]
