"""Claims of users who pretrained dense models of 182M to 454M with FP8."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.claims.claim import ABOUT, AT_LEAST, AT_MOST, Claim, Near, Source
from benchmarks.claims.finetuning import ONE_PERCENT
from pytest_fp8.case import Case

FUSED = Source("description of a 182M model in Transformer Engine's layers")
FIRST_LOOK = Source("first look at an H200, before there was a suite", kind="own", gpu="h200")
COMPILED = Source("set-up guide for compiled torchao, 350M and 454M", gpu="h100")

FUSED_182M = Case("182m", "te_fused", "delayed")
PLAIN_182M = Case("182m", "transformer_engine", "delayed")
HISTORY_16 = replace(FUSED_182M, options={"amax_history_len": 16})
TENSORWISE_350M, TENSORWISE_454M = Case("350m", "torchao", "tensorwise"), Case("454m", "torchao", "tensorwise")
EAGER_454M = replace(TENSORWISE_454M, compile=False)
TENSORWISE_1B = Case("1b", "torchao", "tensorwise")
EAGER_1B = replace(TENSORWISE_1B, compile=False)

OWN_BATCH = {"batch": "our own"}
LONG_HISTORY = {"settings": "an amax history of 1024 steps instead of 16", **OWN_BATCH}
ON_182M = (Near(HISTORY_16, OWN_BATCH), Near(FUSED_182M, LONG_HISTORY))
EAGER = (Near(EAGER_454M, OWN_BATCH), Near(EAGER_1B, {"model": "1B instead of 454M"}))


def _here(case: Case) -> Near:
    assert case.tokens is not None, "a model of the suite"
    batch, seq = case.tokens
    return Near(case, {"batch": f"our own, {batch}x{seq} tokens"})


ON_454M, ON_350M = (_here(TENSORWISE_454M),), (_here(TENSORWISE_350M),)


def _on_182m(name: str, says: str, metric: str, compare: str, low: float, high: float) -> Claim:
    return Claim(name, says, metric, compare, low, high, FUSED, ON_182M)


def _compiled(name: str, says: str, metric: str, low: float, high: float, cases: tuple[Near, ...]) -> Claim:
    return Claim(name, says, metric, AT_LEAST, low, high, COMPILED, cases)


PRETRAINING: tuple[Claim, ...] = (
    _on_182m("fused-182m-speed", "182M with joined q, k and v: 1.7x to 2.2x", "speedup", AT_LEAST, 1.7, 2.2),
    _on_182m("fused-182m-memory", "the whole step takes about 0.7x the memory", "memory_ratio", AT_MOST, 0.7, 0.7),
    _on_182m("fused-182m-activations", "activations take half to 0.7x", "activation_ratio", AT_MOST, 0.5, 0.7),
    _on_182m("fused-182m-bf16-rate", "BF16 does 56k tokens a second", "bf16_tokens_per_s", ABOUT, 56e3, 56e3),
    _on_182m("fused-182m-fp8-rate", "FP8 does 95k to 123k tokens a second", "fp8_tokens_per_s", AT_LEAST, 95e3, 123e3),
    _on_182m("fused-182m-loss", "the loss stays within 1 %", "loss_gap", AT_MOST, ONE_PERCENT, ONE_PERCENT),
    Claim(
        "fused-182m-joined",
        "joining q, k and v alone gives another 15 % to 20 %",
        "speedup_over_other",
        AT_LEAST,
        1.15,
        1.20,
        FUSED,
        (Near(FUSED_182M, {"layers": "norms are joined with the products after them, too", **OWN_BATCH}, PLAIN_182M),),
    ),
    _compiled("torchao-454m-rate", "454M in FP8 does 850k tokens a second", "fp8_tokens_per_s", 850e3, 850e3, ON_454M),
    _compiled("bf16-454m-rate", "454M in BF16 does 650k tokens a second", "bf16_tokens_per_s", 650e3, 650e3, ON_454M),
    _compiled(
        "torchao-454m-speed",
        "454M gains 31 %: 650k to 850k tokens a second",
        "speedup",
        1.31,
        1.31,
        (
            *ON_454M,
            Near(Case("454m", "transformer_engine", "delayed"), {"library": "Transformer Engine instead of torchao"}),
        ),
    ),
    _compiled("torchao-454m-double", "compiled FP8 is about twice as fast as BF16", "speedup", 2.0, 2.0, ON_454M),
    _compiled("torchao-350m-rate", "350M in FP8 does 900k tokens a second", "fp8_tokens_per_s", 900e3, 900e3, ON_350M),
    _compiled("bf16-350m-rate", "350M in BF16 does 700k tokens a second", "bf16_tokens_per_s", 700e3, 700e3, ON_350M),
    _compiled("torchao-350m-speed", "350M gains 29 %: 700k to 900k", "speedup", 1.29, 1.29, ON_350M),
    Claim(
        "eager-slower",
        "without compiling, FP8 is slower than BF16",
        "speedup",
        AT_MOST,
        1.0,
        1.0,
        COMPILED,
        EAGER,
    ),
    Claim(
        "eager-rate",
        "without compiling, FP8 does less than 50k tokens a second",
        "fp8_tokens_per_s",
        AT_MOST,
        50e3,
        50e3,
        COMPILED,
        EAGER,
    ),
    Claim(
        "eager-against-compiled",
        "without compiling, an FP8 step takes 2.5x a compiled BF16 step",
        "step_over_other_bf16",
        ABOUT,
        2.5,
        2.5,
        FIRST_LOOK,
        (Near(EAGER_1B, other=TENSORWISE_1B),),
    ),
    Claim(
        "recomputation-slower",
        "activation checkpointing makes the FP8 step about 3x as long",
        "step_over_other_fp8",
        ABOUT,
        3.0,
        3.0,
        COMPILED,
        (Near(replace(TENSORWISE_454M, activation_checkpointing=True), OWN_BATCH, TENSORWISE_454M),),
    ),
)
