"""The ways to switch FP8 on, by name."""

from __future__ import annotations

from importlib import import_module
from typing import cast

from pytest_fp8.backends.base import Backend

CLASSES = {
    "bf16": "bf16:Bf16",
    "torchao": "torchao:TorchAO",
    "transformer_engine": "transformer_engine:TransformerEngine",
    "te_fused": "te_fused:FusedTransformerEngine",
    "accelerate_bf16": "accelerate_bf16:AccelerateBf16",
    "accelerate_te": "accelerate:AccelerateTransformerEngine",
    "accelerate_torchao": "accelerate:AccelerateTorchAO",
    "trainer_te": "trainer:TrainerTransformerEngine",
    "trainer_torchao": "trainer:TrainerTorchAO",
    "unsloth": "unsloth:Unsloth",
    "unsloth_bf16": "unsloth:UnslothBf16",
    "unsloth_te": "unsloth_te:UnslothTransformerEngine",
}
"""Name -> module and class."""


def backend(name: str) -> Backend:
    """The backend of that name; its library is imported only when one of its methods needs it. Raises ``KeyError``."""
    module, _, kind = CLASSES[name].partition(":")
    return cast(Backend, getattr(import_module(f"{__name__}.{module}"), kind)())
