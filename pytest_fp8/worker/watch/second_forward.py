"""Whether recomputation computes again what the first forward pass did: samples of what enters layers and of draws."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

SAMPLE = 1024
"""Values of a tensor that are compared."""
OTHER = 0.1
"""Relative distance from which a tensor is another one. What is rounded otherwise, as by sums in another order, is
within 0.4 % in bfloat16. Another mask of a dropout at rate p is sqrt(2 p) away: 14 % at 0.01, 45 % at 0.1."""


class SecondForward:
    """What the first forward pass of a step noted, and what recomputation notes again."""

    def __init__(self) -> None:
        self._first: dict[Any, list[torch.Tensor]] = {}
        self._again: dict[Any, list[tuple[str, torch.Tensor]]] = {}
        self._picked: dict[Any, torch.Tensor] = {}

    def note(self, key: str, layer: str, tensor: torch.Tensor, again: bool) -> None:
        """``key`` tells what may be the same tensor in both passes; ``layer`` is what a message names."""
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or not tensor.numel() or tensor.is_complex():
            return
        if tensor.layout != torch.strided or tensor.is_nested or tensor.device.type == "meta":
            return
        with torch.no_grad(), _disable_current_modes():
            sample = self._sample(tensor.detach())
        same = key, tensor.numel(), tensor.device
        if again:
            self._again.setdefault(same, []).append((layer, sample))
        else:
            self._first.setdefault(same, []).append(sample)

    def _sample(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same places of each tensor of one size, at random."""
        size, device = tensor.numel(), tensor.device
        if (size, device) not in self._picked:
            generator = torch.Generator().manual_seed(size)
            self._picked[size, device] = torch.randint(size, (SAMPLE,), generator=generator).to(device)
        return tensor.reshape(-1)[self._picked[size, device]].float()

    @torch.no_grad()
    def other(self) -> list[str]:
        """Layers at which recomputation had what no forward pass before it had."""
        names: list[str] = []
        distances: list[torch.Tensor] = []
        for key, again in self._again.items():
            if key in self._first:
                first, second = torch.stack(self._first[key]), torch.stack([sample for _, sample in again])
                # Not by products, which TF32 or cancellation would blur.
                far = torch.cdist(second, first, compute_mode="donot_use_mm_for_euclid_dist").amin(dim=1)
                distances.append(far / second.norm(dim=1).clamp(min=torch.finfo(torch.float32).tiny))
                names.extend(layer for layer, _ in again)
        told = [one for far in distances for one in far.tolist()]
        return list(dict.fromkeys(name for name, far in zip(names, told, strict=True) if far > OTHER))
