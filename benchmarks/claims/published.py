"""Claims with a public address: what libraries and their integrations say of themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from benchmarks.claims.claim import AT_LEAST, Claim, Near, Source
from pytest_fp8.case import Case

TORCHAO = Source(
    "torchao's documentation", "https://docs.pytorch.org/ao/stable/workflows/training.html", "published", "h100", 8
)
TORCHTITAN = Source(
    "torchtitan's benchmarks",
    "https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md",
    "published",
    "h100",
    8,
)
TUTORIAL = Source(
    "Transformer Engine's tutorial",
    "https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/examples/te_llama/"
    "tutorial_accelerate_hf_llama_with_te.html",
    "published",
)
LLAMA_FACTORY = Source(
    "LlamaFactory, pull request 9705", "https://github.com/hiyouga/LlamaFactory/pull/9705", "published", "h100"
)

ALONE = {"parallelism": "no FSDP2, and so no FP8 all-gather"}
OWN_REFERENCE = {
    "reference": "compiled PyTorch in BF16 instead of the same layers in BF16",
    "layers": "Linears alone are replaced",
}
DELAYED_8B = Case("8b", "transformer_engine", "delayed")


def as_published(recipe: str, options: Mapping[str, Any]) -> tuple[Near, ...]:
    """The suite's cases of 8B with one sequence of 8192 tokens on each GPU, those on most GPUs first."""
    case = Case("8b", "torchao", recipe, seq=8192)
    sharded = (replace(case, options=options, gpus=gpus, batch=gpus, parallel="fsdp2") for gpus in (8, 4, 2))
    kept = {"settings": "no activations recomputed"}
    return (*(Near(each, kept) for each in sharded), Near(replace(case, batch=1), {**ALONE, **kept}))


TENSORWISE_8B = as_published("tensorwise", {"float8_all_gather": True, "precompute_scale": True})
PUBLISHED: tuple[Claim, ...] = (
    Claim(
        "torchao-8b-tensorwise",
        "8B on eight GPUs, compiled: tensorwise scaling gains a quarter",
        "speedup",
        AT_LEAST,
        1.25,
        1.25,
        TORCHAO,
        TENSORWISE_8B,
    ),
    Claim(
        "torchao-8b-rowwise",
        "8B on eight GPUs, compiled: rowwise scaling gains a tenth",
        "speedup",
        AT_LEAST,
        1.10,
        1.10,
        TORCHAO,
        as_published("rowwise", {}),
    ),
    Claim(
        "torchtitan-8b",
        "8B on eight GPUs, both sides compiled: FP8 gains 28 %",
        "speedup",
        AT_LEAST,
        1.28,
        1.28,
        TORCHTITAN,
        TENSORWISE_8B,
    ),
    Claim(
        "te-tutorial-llama2-7b",
        "Fine-tuning 7B with Transformer Engine's layers: FP8 gains 16 % over the same layers in BF16",
        "speedup",
        AT_LEAST,
        1.16,
        1.16,
        TUTORIAL,
        (Near(DELAYED_8B, {"model": "8B instead of 7B", **OWN_REFERENCE}),),
    ),
    Claim(
        "te-tutorial-llama3-8b",
        "Fine-tuning 8B with Transformer Engine's layers: FP8 gains 17 % over the same layers in BF16",
        "speedup",
        AT_LEAST,
        1.17,
        1.17,
        TUTORIAL,
        (Near(DELAYED_8B, OWN_REFERENCE),),
    ),
    Claim(
        "llamafactory-7b",
        "Fine-tuning a 7B model through a training framework with Transformer Engine: FP8 gains 13 %",
        "speedup",
        AT_LEAST,
        1.13,
        1.13,
        LLAMA_FACTORY,
        (
            Near(
                Case("8b", "accelerate_te", "delayed", {"amax_compute_algo": "max"}),
                {"model": "8B Llama instead of a 7B model", "framework": "Accelerate alone"},
            ),
            Near(DELAYED_8B, {"model": "8B Llama instead of a 7B model", "framework": "none above Transformer Engine"}),
        ),
    ),
)
