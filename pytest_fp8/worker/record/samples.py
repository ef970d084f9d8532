"""Samples of tensors: the same places in tensors of one size, so that two of them can be compared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

MANY = 2**16
"""Values of a tensor. The standard error of a share of them is below 0.002; at 8B the copies are 38 MB of bfloat16."""


@contextmanager
def unwatched() -> Iterator[None]:
    """What is computed inside is no part of the step."""
    # Private: torch has no public way to compute past the modes that record operators.
    with torch.no_grad(), _disable_current_modes():
        yield


class Lines:
    """Indices of some rows or columns of matrices, on one device. Drawn once for each size: copying a draw to a GPU in
    each call would make the host wait."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._drawn: dict[tuple[int, int, int], torch.Tensor] = {}

    def __call__(self, size: int, most: int, draw: int = 0) -> torch.Tensor:
        """All of ``size`` indices; of more than ``most`` as many at random, since a regular choice could miss a regular
        fault, and both ends: a kernel's last tile is often a part of one. Each ``draw`` gives others."""
        if (size, most, draw) not in self._drawn:
            drawn = torch.arange(size)
            if size > most:
                generator = torch.Generator().manual_seed(size + 1_000_003 * draw)
                ends = torch.tensor([0, size - 1])
                drawn = torch.cat([torch.randint(size, (most,), generator=generator), ends]).unique()
            self._drawn[size, most, draw] = drawn.to(self._device)
        return self._drawn[size, most, draw]


def values(tensor: torch.Tensor, most: int = MANY) -> torch.Tensor:
    """About ``most`` values of a tensor, evenly spread, as a view; all where there are fewer than twice as many."""
    while is_traceable_wrapper_subclass(tensor):
        # torchao's wrapper of a weight keeps the weight itself first; a weight that is stored in FP8, its FP8 values,
        # and it knows no reshape.
        tensor = getattr(tensor, tensor.__tensor_flatten__()[0][0])
    flat = tensor.detach().reshape(-1)
    if flat.is_floating_point() and flat.element_size() == 1:
        flat = flat.view(torch.uint8)
    # An odd stride meets every column of a matrix whose width is a power of two.
    return flat[:: max(1, flat.numel() // most) | 1]
