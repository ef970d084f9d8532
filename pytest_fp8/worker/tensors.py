"""A model's tensors: by the plain model's names, whole or in shards, and their digests.

A fused layer keeps q, k and v as rows of one weight. Under the plain names it is three views of that weight, which are
saved, loaded and compared like any other weights without a copy.

Of a tensor in shards (``DTensor``, ZeRO-3) there is the part of this rank, the whole, and filling a part from a whole.
On any other tensor each of these functions gives it back. :func:`full` gathers, so that every rank must call it for the
same tensors in the same order.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

from pytest_fp8.backends import zero
from pytest_fp8.backends.base import FusedParams

# -- names ------------------------------------------------------------------------------------------------------------


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


def foreign(model: torch.nn.Module, optimizer: Any) -> list[torch.Tensor]:
    """The parameters that the optimizer steps and the model does not have: master copies, or another model's."""
    own = {id(parameter) for parameter in model.parameters()}
    return [each for group in optimizer.param_groups for each in group["params"] if id(each) not in own]


# -- shards -----------------------------------------------------------------------------------------------------------


def is_sharded(tensor: Any) -> bool:
    """Whether it is a ``DTensor``. Does not load its module, which takes a second, where nothing is sharded."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_partitioned(tensor: Any) -> bool:
    """Whether it is a parameter of which each rank holds a part under ZeRO-3, flat."""
    return zero.is_partitioned(tensor)


def shape(tensor: torch.Tensor) -> torch.Size:
    """Of the whole tensor."""
    return zero.shape(tensor)


def is_part(tensor: Any) -> bool:
    """Whether this rank holds a part of it, as a ``DTensor`` or under ZeRO-3."""
    return is_sharded(tensor) or is_partitioned(tensor)


def is_ranks_own(tensor: Any) -> bool:
    """Whether it is a plain parameter of which each rank has a part of its own, as Megatron's column and row parallel
    layers: by the attribute that Megatron sets."""
    return bool(getattr(tensor, "tensor_model_parallel", False))


def is_plain(tensor: Any) -> bool:
    """A parameter with plain numbers, or one of which this rank's part is plain numbers."""
    kind = type(tensor._local_tensor) if is_sharded(tensor) else type(tensor)
    return kind in (torch.Tensor, torch.nn.Parameter)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, in its own memory: a write to it changes the tensor. Without torchao's wrapper for FSDP2."""
    if not is_sharded(tensor):
        return tensor
    # Private: the public ``to_local()`` is a node of autograd's, and gives a view.
    part: torch.Tensor = tensor._local_tensor  # type: ignore[attr-defined]
    while hasattr(part, "__tensor_flatten__") and len(part.__tensor_flatten__()[0]) == 1:
        part = getattr(part, part.__tensor_flatten__()[0][0])
    return part


def part(tensor: torch.Tensor) -> torch.Tensor:
    """What ZeRO-3 holds in parts: this rank's, flat. Any other tensor as it is."""
    return zero.part(tensor) if is_partitioned(tensor) else tensor


def gradient_part(parameter: torch.Tensor) -> torch.Tensor | None:
    """The same of a parameter's gradient, between backward pass and step."""
    return zero.part_of_gradient(parameter) if is_partitioned(parameter) else parameter.grad


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


def partitioned_norm(parameters: Iterable[torch.Tensor]) -> torch.Tensor | None:
    """The norm of all ranks' gradients together; ``None`` where ZeRO-3 holds no parameter."""
    return zero.gradient_norm(parameters)


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


# -- copies in the host's memory --------------------------------------------------------------------------------------

STAGE_BYTES = 1 << 26
"""Of the page-locked buffer."""


def on_host(tensors: Mapping[str, torch.Tensor], device: str = "cuda") -> dict[str, torch.Tensor]:
    """The same values in the host's memory; shards, and what is not on the ``device``, as they are.

    They go through a small page-locked buffer, and several cores then copy it on. Left to the driver, one core copies
    into pages that are new to it, 38 times slower: docs/measurements.md, "What an arm's own work takes"."""
    stage: torch.Tensor | None = None
    found = dict(tensors)
    for name, tensor in tensors.items():
        # Of these alone the bytes are the values.
        whole = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
        if tensor.device.type != device or not whole or tensor.is_nested or tensor.is_quantized:
            continue
        if stage is None:
            stage = torch.empty(STAGE_BYTES, dtype=torch.uint8, pin_memory=device == "cuda")
        flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        # A single element is contiguous at any stride, but for this view.
        source = flat.as_strided(flat.shape, (1,)).view(torch.uint8)
        copy = torch.empty(source.shape, dtype=torch.uint8)
        for part, target in zip(source.split(STAGE_BYTES), copy.split(STAGE_BYTES), strict=True):
            through = stage[: part.numel()]
            through.copy_(part)
            target.copy_(through)
        found[name] = copy.view(tensor.dtype).reshape(tensor.shape)
    return found


# -- samples ---------------------------------------------------------------------------------------------------------

MANY = 2**16
"""Values of a tensor. The standard error of a share of them is below 0.002; at 8B the copies are 38 MB of bfloat16."""


@contextmanager
def unwatched() -> Iterator[None]:
    """What is computed inside is no part of the step."""
    # Private: torch has no public way to compute past the modes that record operators.
    with torch.no_grad(), _disable_current_modes():
        yield


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


# -- digests ----------------------------------------------------------------------------------------------------------


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
