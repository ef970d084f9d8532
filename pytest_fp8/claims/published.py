"""Claims with a public address: what libraries and their integrations say of themselves."""

from __future__ import annotations

from pytest_fp8.case import Case
from pytest_fp8.claims.claim import AT_LEAST, Claim, Near, Source

TORCHAO = Source("torchao's documentation", "https://docs.pytorch.org/ao/stable/workflows/training.html", "published")
TORCHTITAN = Source(
    "torchtitan's benchmarks",
    "https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md",
    "published",
)
TUTORIAL = Source(
    "Transformer Engine's tutorial",
    "https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/examples/te_llama/"
    "tutorial_accelerate_hf_llama_with_te.html",
    "published",
)
LLAMA_FACTORY = Source(
    "LlamaFactory, pull request 9705", "https://github.com/hiyouga/LlamaFactory/pull/9705", "published"
)

EIGHT_GPUS = "one GPU instead of eight H100 with FSDP2, so no FP8 all-gather"
TENSORWISE_8B = Case("8b", "torchao", "tensorwise")
DELAYED_8B = Case("8b", "transformer_engine", "delayed")

PUBLISHED: tuple[Claim, ...] = (
    Claim(
        "torchao-8b-tensorwise",
        "8B on eight GPUs, compiled: tensorwise scaling gains a quarter",
        "speedup",
        AT_LEAST,
        1.25,
        1.25,
        TORCHAO,
        (Near(TENSORWISE_8B, f"{EIGHT_GPUS}; 1x4096 tokens instead of 1x8192"),),
    ),
    Claim(
        "torchao-8b-rowwise",
        "8B on eight GPUs, compiled: rowwise scaling gains a tenth",
        "speedup",
        AT_LEAST,
        1.10,
        1.10,
        TORCHAO,
        (Near(Case("8b", "torchao", "rowwise"), f"{EIGHT_GPUS}; 1x4096 tokens instead of 1x8192"),),
    ),
    Claim(
        "torchtitan-8b",
        "8B on eight GPUs, both sides compiled: FP8 gains 28 %",
        "speedup",
        AT_LEAST,
        1.28,
        1.28,
        TORCHTITAN,
        (Near(TENSORWISE_8B, f"{EIGHT_GPUS}; another batch"),),
    ),
    Claim(
        "te-tutorial-llama2-7b",
        "Fine-tuning 7B with Transformer Engine's layers: FP8 gains 16 % over the same layers in BF16",
        "speedup",
        AT_LEAST,
        1.16,
        1.16,
        TUTORIAL,
        (Near(DELAYED_8B, "8B instead of 7B; the reference is compiled PyTorch in BF16; Linears alone are replaced"),),
    ),
    Claim(
        "te-tutorial-llama3-8b",
        "Fine-tuning 8B with Transformer Engine's layers: FP8 gains 17 % over the same layers in BF16",
        "speedup",
        AT_LEAST,
        1.17,
        1.17,
        TUTORIAL,
        (Near(DELAYED_8B, "the reference is compiled PyTorch in BF16; Linears alone are replaced"),),
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
                "8B Llama instead of a 7B model; Accelerate alone",
            ),
            Near(DELAYED_8B, "8B Llama instead of a 7B model; Transformer Engine without a framework above it"),
        ),
    ),
)
