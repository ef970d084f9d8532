"""A storage of torch's from its bytes: how tensors that a workload's functions hold come to an arm."""

from __future__ import annotations

from typing import Any


def storage_of(content: bytes, dtype: Any) -> Any:
    """``content``: the bytes of the whole storage; ``dtype``: of its elements."""
    import torch

    values = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
    return torch.storage.TypedStorage(wrap_storage=values.untyped_storage(), dtype=dtype, _internal=True)
