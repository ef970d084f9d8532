"""The ways to switch FP8 on, by name."""

from __future__ import annotations

from pytest_fp8.backends.base import Backend


def backend(name: str) -> Backend:
    """The backend of that name; its library is imported only when one of its methods needs it. Raises ``KeyError``."""
    if name == "torchao":
        from pytest_fp8.backends.torchao import TorchAO

        return TorchAO()
    if name == "transformer_engine":
        from pytest_fp8.backends.transformer_engine import TransformerEngine

        return TransformerEngine()
    if name == "te_fused":
        from pytest_fp8.backends.te_fused import FusedTransformerEngine

        return FusedTransformerEngine()
    if name == "accelerate_bf16":
        from pytest_fp8.backends.accelerate_bf16 import AccelerateBf16

        return AccelerateBf16()
    if name in ("accelerate_te", "accelerate_torchao"):
        from pytest_fp8.backends.accelerate import AccelerateTorchAO, AccelerateTransformerEngine

        return AccelerateTransformerEngine() if name.endswith("te") else AccelerateTorchAO()
    if name in ("trainer_te", "trainer_torchao"):
        from pytest_fp8.backends.trainer import TrainerTorchAO, TrainerTransformerEngine

        return TrainerTransformerEngine() if name.endswith("te") else TrainerTorchAO()
    if name in ("unsloth", "unsloth_bf16"):
        from pytest_fp8.backends.unsloth import Unsloth, UnslothBf16

        return Unsloth() if name == "unsloth" else UnslothBf16()
    if name == "unsloth_te":
        from pytest_fp8.backends.unsloth_te import UnslothTransformerEngine

        return UnslothTransformerEngine()
    if name == "bf16":
        from pytest_fp8.backends.bf16 import Bf16

        return Bf16()
    raise KeyError(name)
