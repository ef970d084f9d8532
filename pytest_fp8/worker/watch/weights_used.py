"""Tells whose weight a matrix product multiplies, through views, transposes, casts and copies of the weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.autograd.function import BackwardCFunction
from torch.multiprocessing.reductions import StorageWeakRef

from pytest_fp8.questions.layers.products import EVALUATION

COPIES = ("_to_copy", "clone")
"""What autocast, ``.to()`` and ``.contiguous()`` call."""


class WeightsUsed:
    """``layers``: name -> module with a weight. Weights are looked up when a product runs: FSDP2 gathers them anew."""

    def __init__(self, layers: Mapping[str, torch.nn.Module]) -> None:
        self._layers = layers
        self._copied: dict[StorageWeakRef, tuple[StorageWeakRef, int]] = {}
        """Storage of a copy -> storage of what it was copied from, and the offset there."""

    def note(self, operator: str, changes: bool, given: list[torch.Tensor], made: list[torch.Tensor]) -> None:
        """``changes``: the operator works in place. A copy that was changed is no copy: a weight with LoRA merged."""
        if operator in COPIES and _is_plain(given[0]) and _is_plain(made[0]):
            self._copied[StorageWeakRef(made[0].untyped_storage())] = self._origin(given[0])
        elif changes and given and _is_plain(given[0]):
            self._copied.pop(StorageWeakRef(given[0].untyped_storage()), None)

    def used(self, operands: Sequence[torch.Tensor], phase: str) -> str:
        """The layer whose weight is one of two operands, where training or an evaluation goes through this product.

        Empty for a product of weights alone (a penalty on W W^T), with a vector (power iteration), or in a forward pass
        without gradients (a measured quantization error). In a backward pass only products of a hand-written function
        count: the others follow from products of the forward pass.
        """
        recorded = torch.is_grad_enabled() and any(operand.requires_grad for operand in operands)
        by_hand = isinstance(torch._C._current_autograd_node(), BackwardCFunction)
        if not (recorded or by_hand or phase == EVALUATION):
            return ""
        left, right = operands
        if 1 in (left.shape[-2], right.shape[-1]):
            return ""
        found = {self._weight(left), self._weight(right)}
        return max(found) if "" in found else ""

    def _weight(self, tensor: torch.Tensor) -> str:
        if not _is_plain(tensor):
            return ""
        storage, offset = self._origin(tensor)
        for name, layer in self._layers.items():
            weight = layer._parameters.get("weight")
            # FSDP and DeepSpeed keep the weights of several layers in one storage.
            if weight is not None and _is_plain(weight) and StorageWeakRef(weight.untyped_storage()) == storage:
                start = weight.storage_offset()
                if start <= offset < start + weight.numel():
                    return name
        return ""

    def _origin(self, tensor: torch.Tensor) -> tuple[StorageWeakRef, int]:
        storage, offset = StorageWeakRef(tensor.untyped_storage()), int(tensor.storage_offset())
        while storage in self._copied:
            storage, start = self._copied[storage]
            offset += start
        return storage, offset


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor's numbers lie in its own storage: not a DTensor's, a sparse or a nested tensor's."""
    return tensor.layout is torch.strided and not tensor.is_nested and not hasattr(tensor, "__tensor_flatten__")
