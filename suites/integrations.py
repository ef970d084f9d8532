"""The cases of the ways to switch FP8 on: Accelerate, the Trainer, Unsloth, adapters, fused layers, own models."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from pytest_fp8 import Case


def on_hopper(cases: Iterable[Case]) -> list[Case]:
    """The suite was measured on Hopper, and is skipped on other GPUs."""
    return [replace(case, chip="hopper") for case in cases]


UNTIMED = ("layers", "numerics", "loss", "memory", "checkpoints")
"""Every question but speed."""
ALL_BUT_LOSS = ("layers", "numerics", "speedup", "memory", "checkpoints")
"""Every question but the loss, which another case of the same steps is asked."""
# The optimizer's state is twice as large as the weights. Checkpoints hold it for tiny in every recipe, and for 1B in
# one recipe of each library: the one most used, and the one that keeps scaling state. Those of 8B are its 15 GiB of
# weights.
WEIGHTS_ALONE: dict[str, Any] = {"checkpoint_formats": ("safetensors",), "resume": False}

# Accelerate and the Trainer make of a tied head a weight of its own, which nothing trains and no checkpoint carries.
# With Transformer Engine 1B fails its layers question (suites/test_defects.py), so no figure of it can be stored.
MOST = {"amax_compute_algo": "max"}
PLAIN_WEIGHTS = {"fp8_all_gather": False}
ACCELERATE = [
    Case("micro", "accelerate_torchao", "tensorwise", emulated=True),
    Case("micro", "trainer_torchao", "tensorwise", PLAIN_WEIGHTS, emulated=True),
    Case("micro", "accelerate_torchao", "tensorwise", autocast=True, questions=("layers", "loss"), emulated=True),
    Case("micro", "trainer_torchao", "tensorwise", PLAIN_WEIGHTS, autocast=True, questions=("layers",), emulated=True),
    *(
        Case("tiny", b, r, options, questions=UNTIMED)
        for b, r, options in (
            ("accelerate_te", "delayed", MOST),
            ("trainer_te", "delayed", MOST),
            ("trainer_torchao", "tensorwise", PLAIN_WEIGHTS),
        )
    ),
    Case("1b", "accelerate_torchao", "tensorwise", **WEIGHTS_ALONE),
    Case("1b", "trainer_torchao", "tensorwise", PLAIN_WEIGHTS, **WEIGHTS_ALONE),
]
"""FP8 as users of Accelerate and of the Trainer switch it on, with the options that avoid the known defects. The
Trainer's figures of Transformer Engine are Accelerate's, so tiny alone is asked there."""

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
UNSLOTH = [
    # Checkpoints hold the adapters alone: a frozen base in FP8 is no checkpoint. Those of tiny hold the optimizer, too.
    # On the random weights of 1B the loss jumps by 1.5 nats from step to step, and cannot tell whether training
    # resumed.
    Case("tiny", "unsloth", "rowwise", lora=16, questions=UNTIMED),
    Case("1b", "unsloth", "rowwise", lora=16, lora_targets=ATTENTION, **WEIGHTS_ALONE),
]
"""Unsloth's ``load_in_fp8`` against its own 16-bit LoRA, with the settings that its users are told to take."""

VARIANTS = [
    # A decoder in Transformer Engine's own layers.
    Case("tiny", "te_fused", "current", questions=UNTIMED),
    Case("182m", "te_fused", "delayed"),
    Case("1b", "torchao", "tensorwise", lora=16, **WEIGHTS_ALONE),
    # Not timed: under Transformer Engine adapters add launches to a step that the host hardly keeps up with. Two
    # processes could hold 2.8 % to 4.3 %.
    Case("1b", "transformer_engine", "delayed", lora=16, questions=UNTIMED, **WEIGHTS_ALONE),
    # te.checkpoint adds launches, too: with 1B's usual four sequences 1.04 +- 0.06.
    Case("1b", "transformer_engine", "delayed", activation_checkpointing=True, batch=8, **WEIGHTS_ALONE),
    # Float32 weights under autocast, as the Trainer's bf16=True and nanoGPT train.
    Case("1b", "torchao", "tensorwise", autocast=True, **WEIGHTS_ALONE),
    Case("1b", "transformer_engine", "current", autocast=True, **WEIGHTS_ALONE),
    Case("tiny", "transformer_engine", "delayed", autocast=True, questions=UNTIMED),
    Case("tiny", "accelerate_te", "delayed", MOST, autocast=True, questions=UNTIMED),
]
"""Fused layers, adapters beside a frozen base in FP8, recomputed activations, and float32 weights under autocast."""

# Users' own models and loops: each has a test file, which brings the workload.
HORIZON: dict[str, Any] = {"steps": 20, "seeds": 3}
OWN_EMULATED: dict[str, Any] = {"emulated": True, **HORIZON}
# One loop and one architecture are timed: the others' products are those of 1B, whose speed 1B's cases hold. The timed
# loop is of 1B, whose loss in twice its usual batch took minutes of an H200 and was decided by a widened margin alone;
# the loops of 182m are asked for it.
LOOP = [
    Case("own", "torchao", "tensorwise", name="loop", **OWN_EMULATED),
    Case("own", "torchao", "tensorwise", name="loop", autocast=True, questions=("layers", "numerics"), **OWN_EMULATED),
    Case("own", "torchao", "tensorwise", name="loop", questions=ALL_BUT_LOSS, **WEIGHTS_ALONE),
    Case("own", "torchao", "tensorwise", name="loop_ac", questions=UNTIMED, **HORIZON),
    Case("own", "transformer_engine", "delayed", name="loop", questions=UNTIMED, **HORIZON),
]
VIT = [
    # 20 steps of 16 pictures teach it nothing: the loss stays at ln(10). In 60 it falls by four standard errors.
    Case("own", "torchao", "tensorwise", name="vit", emulated=True, steps=60, seeds=3),
    Case("own", "torchao", "tensorwise", name="vit", **HORIZON),
    Case("own", "transformer_engine", "current", name="vit", questions=UNTIMED, **HORIZON),
]
# Each step routes other rows, so that shapes change and nothing is compiled: no case for the speed question.
EAGER_OWN: dict[str, Any] = {"compile": False, "questions": ("layers", "numerics", "loss", "checkpoints"), **HORIZON}
MOE = [
    Case("own", "torchao", "tensorwise", name="moe", **OWN_EMULATED),
    Case("own", "torchao", "tensorwise", name="moe", **EAGER_OWN),
    Case("own", "transformer_engine", "current", name="moe", **EAGER_OWN),
]
SFT_QUESTIONS = ("layers", "numerics", "loss")
SFT = [
    Case("own", "trainer_torchao", "tensorwise", PLAIN_WEIGHTS, name=f"sft_{kind}", questions=SFT_QUESTIONS, **more)
    for kind in ("padded", "packed", "lora")
    for more in (OWN_EMULATED, HORIZON)
]
LOOP, VIT, MOE, SFT = map(on_hopper, (LOOP, VIT, MOE, SFT))
OWN = LOOP + VIT + MOE + SFT

ALL = ACCELERATE + VARIANTS + UNSLOTH
