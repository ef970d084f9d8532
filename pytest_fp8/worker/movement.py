"""How many of a model's trained weights have moved since a curve's start, parameter by parameter, from samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from pytest_fp8.backends.base import FusedParams
from pytest_fp8.questions.loss.evidence import Moved
from pytest_fp8.worker.fused_params import split, trained

SAMPLE = 2**16
"""Elements looked at of each parameter, evenly spread. The standard error of a share is below 0.002; at 8B the copies
are 38 MB of bfloat16."""


class Movement:
    """Watches the parameters that the optimizer steps, from when it is made."""

    def __init__(self, model: torch.nn.Module, optimizer: Any, fused: FusedParams) -> None:
        self._model, self._fused = model, fused
        self._names = set(trained(model, optimizer, fused))
        self._start = {name: sample(value).clone() for name, value in self._parameters()}
        self._reached = {name: torch.zeros_like(value, dtype=torch.bool) for name, value in self._start.items()}

    def note_gradients(self) -> None:
        """Called before the optimizer steps: notes which elements have a gradient that is not 0."""
        live = self._model.named_parameters(remove_duplicate=False)
        gradients = ((name, p.grad) for name, p in live if p.grad is not None and not p.grad.is_sparse)
        for name, gradient in split(gradients, self._fused):
            if name in self._reached:
                self._reached[name] |= sample(gradient) != 0

    def since_start(self) -> dict[str, Moved]:
        """By plain names."""
        return {
            name: Moved(
                elements=value.numel(),
                moved=_share(sample(value) != self._start[name]),
                reached=_share(self._reached[name]),
            )
            for name, value in self._parameters()
        }

    def _parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        parts = split(self._model.named_parameters(remove_duplicate=False), self._fused)
        return ((name, value) for name, value in parts if name in self._names)


def sample(tensor: torch.Tensor) -> torch.Tensor:
    """At most about :data:`SAMPLE` elements, evenly spread."""
    # torchao's wrapper of a weight for sharded training keeps the weight itself in ``_tensor``.
    flat = getattr(tensor, "_tensor", tensor).detach().reshape(-1)
    # An odd stride meets every column of a matrix whose width is a power of two.
    return flat[:: max(1, flat.numel() // SAMPLE) | 1]


def _share(flags: torch.Tensor) -> float:
    return float(flags.float().mean()) if flags.numel() else 0.0
