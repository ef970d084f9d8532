"""LoRA adapters from peft, in BF16, on a frozen base."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The Linears of a Llama block; peft calls this choice "all-linear"."""
ALPHA = 2
"""LoRA's alpha, per rank."""
LEARNING_RATE = 2e-4
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
