"""The cases of the suite, in the order they run."""

from __future__ import annotations

from dataclasses import replace

import roads
from pytest_fp8 import Case
from roads import WEIGHTS_ALONE

TORCHAO = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
TRANSFORMER_ENGINE = ("delayed", "current", "block")
RECIPES = [
    *(("torchao", recipe) for recipe in TORCHAO),
    *(("transformer_engine", recipe) for recipe in TRANSFORMER_ENGINE),
]
RESUMED = ("tensorwise", "delayed")

EMULATED = [
    *(Case("tiny", "torchao", recipe, loss_steps=20, emulated=True) for recipe in TORCHAO),
    Case("micro", "torchao", "tensorwise", lora=8, emulated=True),
]
"""torchao's numerics on any processor; three seeds of twenty steps, so that two cores are done in minutes."""

# Tiny is launch-bound: its step time says nothing about FP8, so it answers for everything but speed.
TINY = [Case("tiny", b, r, questions=("layers", "loss", "memory", "checkpoints")) for b, r in RECIPES]
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

HOPPER = TINY + ONE_B + EIGHT_B
ALL = EMULATED + HOPPER + roads.ALL

OWN = roads.OWN
"""Asked in the files that bring their workloads; listed here for `pytest-fp8 baselines`."""

NULL = replace(Case("1b", "bf16", "none"), questions=("speedup",))
"""BF16 against BF16: what the instrument reads when there is nothing to see."""
