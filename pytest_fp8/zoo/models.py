"""Builds the suite's models: transformers' Llama architecture, with random weights of a seed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pytest_fp8.zoo.shapes import SHAPES, Shape

if TYPE_CHECKING:
    import torch


def llama_config(shape: Shape) -> Any:
    """The transformers configuration of a shape; attention is :func:`causal_attention`."""
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim or shape.hidden // shape.heads,
        intermediate_size=shape.intermediate,
        vocab_size=shape.vocab,
        max_position_embeddings=max(shape.seq, 2048),
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=shape.tied,
        use_cache=False,
        attn_implementation=causal_attention(),
    )


def causal_attention() -> str:
    """The name of ``scaled_dot_product_attention`` with plain causal masking, registered with transformers.

    Under the name "sdpa" transformers waits for the GPU in every forward pass, to look for packed sequences. A name
    without a registered mask function gets no mask and no wait. With it Transformer Engine's 1B arm idled 25 ms of each
    120 ms step on an H200."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register("causal_sdpa", sdpa_attention_forward)
    return "causal_sdpa"


def build(name: str, *, seed: int, device: str, dtype: torch.dtype | None = None) -> torch.nn.Module:
    """The model ``name`` of the zoo on ``device``, in training mode; in bfloat16 where no ``dtype`` is given. Its
    weights are random and depend only on ``seed`` and the kind of device. Raises ``KeyError`` for an unknown name."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    # Initialising on the device takes an 8B model a second instead of a minute.
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(llama_config(SHAPES[name]), dtype=dtype or torch.bfloat16)
    return model.train()  # type: ignore[no-any-return]


# -- LoRA adapters from peft, in BF16, on a frozen base ----------------------------------------------------------------

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The Linears of a Llama block; peft calls this choice "all-linear"."""
ALPHA = 2
"""LoRA's alpha, per rank."""
ADAPTERS_LEARNING_RATE = 2e-4
"""Adapters start at zero and learn with rates about ten times those of full training (peft's own examples). The rate,
alpha and dropout are in no case's hash: a change of one must raise ``case.DEFINITION``, which a test checks."""


def add_adapters(model: torch.nn.Module, rank: int, targets: Sequence[str] = ()) -> torch.nn.Module:
    """``model`` with LoRA matrices of ``rank`` beside each Linear named in ``targets``, all else frozen.

    alpha is proportional to the rank (:data:`ALPHA`) and there is no dropout, so that ranks differ only in size.
    Adapters get the base's dtype; peft's default, float32, would compute them in float32 and cast around each. Call it
    before a conversion, so that the base's Linears are converted under their names with ``base_layer``.
    """
    from peft import LoraConfig, get_peft_model

    wanted = list(targets or PROJECTIONS)
    config = LoraConfig(r=rank, lora_alpha=ALPHA * rank, lora_dropout=0.0, target_modules=wanted, task_type=None)
    return get_peft_model(model, config, autocast_adapter_dtype=False)  # type: ignore[no-any-return]
