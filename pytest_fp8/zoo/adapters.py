"""LoRA adapters from peft, in BF16, on a frozen base: what FP8 training meets when only adapters learn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The Linears of a Llama block; peft calls them "all-linear"."""
ALPHA = 2
"""alpha per rank."""
LEARNING_RATE = 2e-4
"""Adapters start at zero and learn with rates some ten times those of full training (peft's own examples). Like alpha
and dropout below it is in no case's hash: whoever changes one raises ``cases.MEASUREMENT``, which a test asks for."""


class NoSuchLinear(ValueError):
    """An adapter's target that the model does not have."""

    fp8_cause = "lora_targets are the last parts of Linears' names, and without them a Llama's projections are meant"
    fp8_next = "name the model's own Linears: lora_targets=('fc1', 'fc2')"


def add_adapters(model: torch.nn.Module, rank: int, targets: Sequence[str] = ()) -> torch.nn.Module:
    """``model`` with LoRA matrices of ``rank`` beside each Linear named in ``targets``, all else frozen.

    alpha goes with the rank (:data:`ALPHA`) and there is no dropout, so that ranks differ in nothing but their size.
    Adapters get the base's dtype: peft's own default, float32, would compute them in float32 and cast around each. To
    be called before any conversion: peft knows no FP8 layer, and the base keeps its names under ``base_layer``. Raises
    :class:`NoSuchLinear` where a target names no Linear.
    """
    import torch
    from peft import LoraConfig, get_peft_model

    names = {name.rsplit(".", 1)[-1] for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    wanted = list(targets or PROJECTIONS)
    missing = [target for target in wanted if target not in names]
    if missing:
        raise NoSuchLinear(f"no Linear is named {missing[0]!r}; this model has {', '.join(sorted(names))}")
    config = LoraConfig(r=rank, lora_alpha=ALPHA * rank, lora_dropout=0.0, target_modules=wanted, task_type=None)
    return get_peft_model(model, config, autocast_adapter_dtype=False)  # type: ignore[no-any-return]
