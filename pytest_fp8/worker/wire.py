"""What travels between ranks: which operators are collectives, and of how many bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pytest_fp8.questions.ledger.evidence import Collective
from pytest_fp8.worker.operators import dtype_name

SPACES = ("c10d::", "_c10d_functional::")
WORDS = {
    "gather": "all-gather",
    "reducescatter": "reduce-scatter",
    "allreduce": "all-reduce",
    "broadcast": "broadcast",
    "alltoall": "all-to-all",
}


def collective_of(phase: str, operator: str, tensors: Sequence[torch.Tensor]) -> Collective | None:
    """The collective that an operator starts; ``None`` for any other operator. Its bytes are those of the largest
    tensor: the whole of what is gathered, or of what is reduced."""
    if not operator.startswith(SPACES) or not tensors:
        return None
    plain = operator.partition("::")[2].replace("_", "")
    kind = next((word for part, word in WORDS.items() if part in plain), None)
    if kind is None:
        return None
    largest = max(tensors, key=lambda tensor: tensor.numel() * tensor.element_size())
    return Collective(phase, kind, dtype_name(largest), largest.numel() * largest.element_size(), 1)
