"""The cases of the suite, in the order they run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pytest_fp8 import Case

TORCHAO = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
TRANSFORMER_ENGINE = ("delayed", "current", "block")
RECIPES = [
    *(("torchao", recipe) for recipe in TORCHAO),
    *(("transformer_engine", recipe) for recipe in TRANSFORMER_ENGINE),
]
RESUMED = ("tensorwise", "delayed")

EMULATED = [
    *(Case("tiny", "torchao", recipe, emulated=True) for recipe in TORCHAO),
    Case("tiny", "torchao", "tensorwise", lora=8, emulated=True),
]
"""torchao's numerics on any processor; three seeds, so that two cores are done in minutes."""

# Tiny is launch-bound: its step time says nothing about FP8, so it answers for everything but speed.
TINY = [Case("tiny", b, r, questions=("layers", "loss", "memory", "checkpoints")) for b, r in RECIPES]
# The optimizer's state, twice as large as the weights, travels with tiny in every recipe and with 1B in one recipe of
# each library: the one most used, and the one that keeps scaling state. 8B's 15 GiB of weights travel alone.
WEIGHTS_ALONE: dict[str, Any] = {"checkpoint_formats": ("safetensors",), "resume": False}

SLOWER = {
    ("1b", "rowwise"): "rowwise scaling costs more than it saves on 2048-wide layers: 0.93x on an H200",
    ("8b", "rowwise"): "rowwise scaling of both gradients' operands: 0.97x on an H200",
}
"""Where FP8 is known not to beat BF16 on an H200: expected to fail, strictly, until it does."""


def at_scale(model: str, backend: str, recipe: str) -> Case:
    resumed = model == "1b" and recipe in RESUMED
    more = {} if resumed else WEIGHTS_ALONE
    return Case(model, backend, recipe, slower_because=SLOWER.get((model, recipe), ""), **more)


ONE_B = [at_scale("1b", b, r) for b, r in RECIPES]
EIGHT_B = [at_scale("8b", b, r) for b, r in RECIPES]

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
UNSLOTH = [
    # Adapters alone travel, and their optimizer with them: a frozen base in FP8 is no checkpoint.
    Case("1b", "unsloth", "rowwise", lora=16, lora_targets=ATTENTION),
    Case("1b", "unsloth", "rowwise", lora=16),
    Case("8b", "unsloth", "rowwise", lora=8, lora_targets=("q_proj", "v_proj")),
]
"""Unsloth's ``load_in_fp8`` against its own 16-bit LoRA: the settings that its users are told to take."""

# A decoder in Transformer Engine's own layers. At 182m the same recipes without joined projections stand beside it,
# which tells what joining them adds; the other sizes are those that people reported speedups of.
TE_FUSED = [
    Case("tiny", "te_fused", "current", questions=("layers", "loss", "memory", "checkpoints")),
    Case("182m", "te_fused", "delayed"),
    Case("182m", "te_fused", "current", **WEIGHTS_ALONE),
]
BESIDE = {
    "182m": [("transformer_engine", "delayed"), ("transformer_engine", "current"), ("torchao", "tensorwise")],
    "350m": [("transformer_engine", "delayed"), ("torchao", "tensorwise")],
    "454m": [("transformer_engine", "delayed"), ("torchao", "tensorwise")],
    "3b": [("torchao", "tensorwise"), ("transformer_engine", "current")],
}
DENSE = TE_FUSED + [Case(model, b, r, **WEIGHTS_ALONE) for model, recipes in BESIDE.items() for b, r in recipes]

# What the rank of adapters costs of the speedup (python -m benchmarks.lora), and whether they stay in BF16. Adapters on
# two Linears of a block's seven, at one rank, tell their fixed part from the frozen base.
LORA = [
    *(Case("1b", "torchao", "tensorwise", lora=rank, **WEIGHTS_ALONE) for rank in (8, 16, 32, 64)),
    *(Case("1b", "transformer_engine", "delayed", lora=rank, **WEIGHTS_ALONE) for rank in (8, 16, 32, 64)),
    *(
        Case("1b", backend, recipe, lora=16, lora_targets=("q_proj", "v_proj"), **WEIGHTS_ALONE)
        for backend, recipe in (("torchao", "tensorwise"), ("transformer_engine", "delayed"))
    ),
    *(Case("8b", "torchao", "tensorwise", lora=rank, **WEIGHTS_ALONE) for rank in (16, 32)),
    Case("8b", "transformer_engine", "current", lora=16, **WEIGHTS_ALONE),
]

HOPPER = TINY + ONE_B + EIGHT_B + DENSE + UNSLOTH
ALL = EMULATED + HOPPER + LORA

NULL = replace(Case("1b", "bf16", "none"), questions=("speedup",))
"""BF16 against BF16: what the instrument reads when there is nothing to see."""
