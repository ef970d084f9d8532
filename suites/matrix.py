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

EMULATED = [Case("tiny", "torchao", recipe, emulated=True) for recipe in TORCHAO]
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

# Accelerate converts a tied head into a weight that nothing trains and no checkpoint carries: 1B is asked for neither
# here; suites/test_defects.py asks.
UNTIED = ("layers", "speedup", "memory")
MOST = {"amax_compute_algo": "max"}
PLAIN_WEIGHTS = {"fp8_all_gather": False}
ACCELERATE = [
    Case("tiny", "accelerate_torchao", "tensorwise", emulated=True),
    Case("tiny", "trainer_torchao", "tensorwise", PLAIN_WEIGHTS, emulated=True),
    *(
        Case("tiny", b, r, options, questions=("layers", "loss", "memory", "checkpoints"))
        for b, r, options in (
            ("accelerate_te", "delayed", MOST),
            ("trainer_te", "delayed", MOST),
            ("trainer_torchao", "tensorwise", PLAIN_WEIGHTS),
        )
    ),
    Case("1b", "accelerate_te", "delayed", MOST, questions=UNTIED),
    Case("1b", "accelerate_te", "delayed", MOST, compile=False, questions=UNTIED),
    Case("1b", "accelerate_torchao", "tensorwise", **WEIGHTS_ALONE),
    Case("1b", "trainer_te", "delayed", MOST, questions=UNTIED),
    Case("1b", "trainer_torchao", "tensorwise", PLAIN_WEIGHTS, **WEIGHTS_ALONE),
    Case("8b", "accelerate_torchao", "tensorwise", **WEIGHTS_ALONE),
]
"""FP8 as users of Accelerate and of the Trainer switch it on, with what keeps them from their known defects."""

HOPPER = TINY + ONE_B + EIGHT_B
ALL = EMULATED + HOPPER + ACCELERATE

NULL = replace(Case("1b", "bf16", "none"), questions=("speedup",))
"""BF16 against BF16: what the instrument reads when there is nothing to see."""
