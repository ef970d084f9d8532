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


class NoSuchLinear(ValueError):
    """The model has no Linear of an adapter target's name."""

    fp8_cause = "lora_targets are the last parts of Linears' names; the default is the projections of a Llama"

    def __init__(self, missing: str, names: Sequence[str]) -> None:
        super().__init__(f"no Linear is named {missing!r}; this model has {', '.join(names) or 'none'}")
        self.fp8_next = f"name the model's own Linears: lora_targets={tuple(names[:4])!r}"


def add_adapters(model: torch.nn.Module, rank: int, targets: Sequence[str] = ()) -> torch.nn.Module:
    """``model`` with LoRA matrices of ``rank`` beside each Linear named in ``targets``, all else frozen.

    alpha is proportional to the rank (:data:`ALPHA`) and there is no dropout, so that ranks differ only in size.
    Adapters get the base's dtype; peft's default, float32, would compute them in float32 and cast around each. Call it
    before a conversion, so that the base's Linears are converted under their names with ``base_layer``. Raises
    :class:`NoSuchLinear` where a target names no Linear.
    """
    import torch
    from peft import LoraConfig, get_peft_model

    names = {name.rsplit(".", 1)[-1] for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    wanted = list(targets or PROJECTIONS)
    missing = [target for target in wanted if target not in names]
    if missing:
        raise NoSuchLinear(missing[0], sorted(names))
    config = LoraConfig(r=rank, lora_alpha=ALPHA * rank, lora_dropout=0.0, target_modules=wanted, task_type=None)
    return get_peft_model(model, config, autocast_adapter_dtype=False)  # type: ignore[no-any-return]
