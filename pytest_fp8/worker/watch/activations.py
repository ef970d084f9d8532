"""Keeps activations in the host's memory, for an uncompiled step whose activations do not fit the GPU."""

from __future__ import annotations

from typing import Any
from weakref import ReferenceType, ref

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from pytest_fp8.worker.training.host_copies import new_stage, staged

LEAST_VALUES = 1 << 20
"""Smaller tensors stay where they are."""
PART = 4
"""A view of less than one such part of its storage is copied alone."""


def kept_on_host(room: int = 0, device: str = "cuda") -> torch.autograd.graph.saved_tensors_hooks:
    """A context in which large activations of this type of device wait in the host's memory for the backward pass; the
    first ``room`` bytes of them stay where they are.

    Invisible to dispatch modes. Tensors of a class of their own, such as a library's FP8 tensors, stay on the device.
    Does not notice in-place writes that bypass autograd's version counter. Use it around uncompiled steps only. An 8B
    step needs it on 80 GB: docs/findings.md, "What an arm's own work takes"."""
    copies = _Copies(room, device)
    return torch.autograd.graph.saved_tensors_hooks(copies.take, copies.give_back)


class _Copies:
    """Each storage once, though several operators save it or views of it. It is known by its address, which is not used
    again while somebody refers to the storage weakly."""

    def __init__(self, room: int, device: str) -> None:
        self._room, self._device = room, device
        self._stage: torch.Tensor | None = None
        self._stays: dict[int, StorageWeakRef] = {}
        self._moved: dict[tuple[Any, ...], tuple[StorageWeakRef, ReferenceType[torch.Tensor]]] = {}
        """(Address, version, which part) -> its bytes in the host's memory, while autograd needs them."""

    def take(self, tensor: torch.Tensor) -> Any:
        """What autograd keeps in place of a tensor that an operator saves."""
        if not self._is_large(tensor) or isinstance(tensor._base, torch.nn.Parameter):
            # Weights have a place of their own; what FSDP2 and ZeRO-3 gather, they also give up themselves.
            return tensor
        with _disable_current_modes(), torch.no_grad():
            storage = tensor.untyped_storage()
            if storage._cdata in self._stays:
                return tensor.detach()
            part = tensor.nbytes * PART < storage.nbytes()
            key = storage._cdata, tensor._version, (tensor.storage_offset(), tensor.shape, tensor.stride()) * part
            _, refer = self._moved.get(key, (None, None))
            everything = refer() if refer is not None else None
            if everything is None and storage.nbytes() <= self._room:
                self._room -= storage.nbytes()
                self._stays[storage._cdata] = StorageWeakRef(storage)
                # Detached, or the saved tensor and its grad_fn form a reference cycle.
                return tensor.detach()
            if everything is None:
                every_byte = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
                everything = staged(tensor.contiguous() if part else every_byte, self._buffer())
                self._moved[key] = StorageWeakRef(storage), ref(everything)
            place = (0, _rows(tensor.shape)) if part else (tensor.storage_offset(), tensor.stride())
            return tensor.device, everything, tensor.dtype, tensor.shape, *place

    def _is_large(self, tensor: torch.Tensor) -> bool:
        return (
            type(tensor) is torch.Tensor
            and tensor.device.type == self._device
            and tensor.numel() >= LEAST_VALUES
            and tensor.layout is torch.strided
            and not (tensor.is_nested or tensor.is_conj() or tensor.is_neg())
        )

    def give_back(self, packed: Any) -> torch.Tensor:
        """The tensor that an operator saved, with its strides, on which a kernel may count, but for a small part."""
        if isinstance(packed, torch.Tensor):
            return packed
        device, everything, dtype, shape, offset, stride = packed
        with _disable_current_modes(), torch.no_grad():
            storage = staged(everything, self._buffer(), device).untyped_storage()
            return torch.empty(0, dtype=dtype, device=device).set_(storage, offset, shape, stride)

    def _buffer(self) -> torch.Tensor:
        if self._stage is None:
            self._stage = new_stage(self._device)
        return self._stage


def _rows(shape: torch.Size) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return torch.empty(shape, device="meta").stride()
