"""Keeps activations in the host's memory, for an uncompiled step whose activations do not fit the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import _disable_current_modes

from pytest_fp8.worker.state.host_copies import new_stage, staged
from pytest_fp8.worker.state.shards import local

LEAST_VALUES = 1 << 20
"""Smaller tensors stay where they are."""
RESERVED = 1 / 3
"""Of the GPU's memory, left for what a step needs beside the activations that it keeps and its gradients. For 8B and
8192 tokens the logits and what becomes of them take 15 GiB, and weights that FSDP2 gathers 6."""


@contextmanager
def kept_on_host(room: int = 0, device: str = "cuda") -> Iterator[None]:
    """While open, large activations of this type of device wait in the host's memory for the backward pass; the first
    ``room`` bytes of them stay where they are.

    Compiled, an 8B model's activations for 4096 tokens fit beside its weights on 80 GB; uncompiled they take 40 GiB. On
    two H100s, with 8192 tokens each, an arm took 40 s to copy all of them, each as often as it was saved, and weights.

    Tensors of a class of their own (a library's FP8 tensors) stay where they are. Nothing of it is seen by those who
    watch operators. It also holds what a compiled step saves, which fits: keep it around what is watched alone.
    """
    copies = _Copies(room, device)
    noted = register_module_forward_pre_hook(copies.note_weights)
    try:
        with torch.autograd.graph.saved_tensors_hooks(copies.take, copies.give_back):
            yield
    finally:
        noted.remove()


def room_for_activations(model: torch.nn.Module) -> int:
    """Bytes of the GPU's memory that nothing else in a step needs: what is free now, but for the gradients of this
    rank's weights and :data:`RESERVED`."""
    if not torch.cuda.is_available():
        return 0
    free, whole = torch.cuda.mem_get_info()
    gradients = sum(p.element_size() * local(p).numel() for p in model.parameters() if p.requires_grad)
    return max(0, int(free - gradients - RESERVED * whole))


class _Copies:
    """Each storage once, though several operators save it or views of it. It is known by its address, which is not used
    again while somebody refers to the storage weakly."""

    def __init__(self, room: int, device: str) -> None:
        self._room, self._device = room, device
        self._stage: torch.Tensor | None = None
        self._stays: dict[int, StorageWeakRef] = {}
        """Of weights, and of what stays on the GPU."""
        self._moved: dict[tuple[int, int], tuple[StorageWeakRef, ReferenceType[torch.Tensor]]] = {}
        """(Address, version) -> its bytes in the host's memory, while autograd needs them."""

    def note_weights(self, module: torch.nn.Module, _: Any) -> None:
        """Before a module's forward pass: FSDP2 has put its gathered weights there, and takes them away itself."""
        for weight in module._parameters.values():
            if weight is not None and _is_plain(weight):
                self._note(weight.untyped_storage())

    def _note(self, storage: torch.UntypedStorage) -> None:
        self._stays.setdefault(storage._cdata, StorageWeakRef(storage))

    def take(self, tensor: torch.Tensor) -> Any:
        """What autograd keeps in place of a tensor that an operator saves."""
        if not (_is_plain(tensor) and tensor.device.type == self._device and tensor.numel() >= LEAST_VALUES):
            return tensor
        storage = tensor.untyped_storage()
        key = storage._cdata, tensor._version
        if storage._cdata in self._stays:
            return tensor
        _, refer = self._moved.get(key, (None, None))
        everything = refer() if refer is not None else None
        if everything is None and storage.nbytes() <= self._room:
            self._room -= storage.nbytes()
            self._note(storage)
            return tensor
        if everything is None:
            with _disable_current_modes(), torch.no_grad():
                every_byte = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
                everything = staged(every_byte, self._buffer())
            self._moved[key] = StorageWeakRef(storage), ref(everything)
        return tensor.device, everything, (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)

    def give_back(self, packed: Any) -> torch.Tensor:
        """The tensor that an operator saved, with its strides: a kernel may count on them."""
        if isinstance(packed, torch.Tensor):
            return packed
        device, everything, (offset, shape, stride, dtype) = packed
        with _disable_current_modes(), torch.no_grad():
            storage = staged(everything, self._buffer(), device).untyped_storage()
            return torch.empty(0, dtype=dtype, device=device).set_(storage, offset, shape, stride)

    def _buffer(self) -> torch.Tensor:
        if self._stage is None:
            self._stage = new_stage(self._device)
        return self._stage


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter)
