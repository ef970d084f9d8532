"""Tensors of which each rank holds a part (``DTensor``, ZeRO-3): the part, the whole, and filling a part from a whole.

On any other tensor each function gives it back. :func:`full` gathers, so that every rank must call it for the same
tensors in the same order.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pytest_fp8.worker.training import zero
from pytest_fp8.worker.training.restored import values_kept
from pytest_fp8.worker.training.zero import is_partitioned


def is_sharded(tensor: Any) -> bool:
    """Whether it is a ``DTensor``. Does not load its module, which takes a second, where nothing is sharded."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_part(tensor: Any) -> bool:
    """Whether this rank holds a part of it, as a ``DTensor`` or under ZeRO-3."""
    return is_sharded(tensor) or is_partitioned(tensor)


def is_plain(tensor: Any) -> bool:
    """A parameter with plain numbers, or one of which this rank's part is plain numbers."""
    kind = type(tensor._local_tensor) if is_sharded(tensor) else type(tensor)
    return kind in (torch.Tensor, torch.nn.Parameter)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, in its own memory: a write to it changes the tensor. Without torchao's wrapper for FSDP2."""
    if not is_sharded(tensor):
        return tensor
    part: torch.Tensor = tensor._local_tensor  # type: ignore[attr-defined]
    while hasattr(part, "__tensor_flatten__") and len(part.__tensor_flatten__()[0]) == 1:
        part = getattr(part, part.__tensor_flatten__()[0][0])
    return part


def plain_shards(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor without torchao's wrapper for FSDP2, sharing its memory."""
    if not is_sharded(tensor):
        return tensor
    from torch.distributed.tensor import DTensor

    sharded: Any = tensor
    return DTensor.from_local(
        local(tensor).detach(),
        sharded.device_mesh,
        sharded.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def whole_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """The whole gradient, detached; ``None`` where the parameter has none."""
    if is_partitioned(parameter):
        return zero.gradient(parameter)
    return None if parameter.grad is None else full(parameter.grad.detach())


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor, detached."""
    if is_partitioned(tensor):
        return zero.whole(tensor)
    if not is_sharded(tensor):
        return tensor
    whole: torch.Tensor = plain_shards(tensor).full_tensor()  # type: ignore[attr-defined]
    return whole


def values_of(gradient: torch.Tensor) -> torch.Tensor:
    """The values of a sparse gradient; any other as it is."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


@torch.no_grad()
def assign(target: torch.Tensor, value: torch.Tensor) -> None:
    """Copy ``value`` into ``target``: of a whole tensor the part that belongs here."""
    if is_partitioned(target):
        zero.fill(target, value)
        return
    if not is_sharded(target):
        target.copy_(value)
        return
    local(target).copy_(local(placed(value, target)))


def placed(value: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A whole tensor as shards where ``target`` is sharded."""
    if not is_sharded(target) or is_sharded(value):
        return value
    from torch.distributed.tensor import distribute_tensor

    held: Any = target
    # Every rank has the whole tensor, so none is sent.
    return distribute_tensor(value.to(target.device), held.device_mesh, held.placements, src_data_rank=None)


@torch.no_grad()
def change(tensor: torch.Tensor, changed: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Put in place of this rank's values what ``changed`` makes of them. Under ZeRO-3 it is given the whole, of which
    every rank must make the same."""
    if is_partitioned(tensor):
        assign(tensor, changed(full(tensor)))
    else:
        part = local(tensor)
        part.copy_(changed(part))


@contextmanager
def parts_kept(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """The tensors may be changed. What ZeRO-3 holds in parts is kept whole in the host's memory meanwhile."""
    every = list(tensors)
    held = [(tensor, full(tensor).cpu()) for tensor in every if is_partitioned(tensor)]
    try:
        with values_kept(tensor for tensor in every if not is_partitioned(tensor)):
            yield
    finally:
        for tensor, value in held:
            assign(tensor, value.to(tensor.device))
