"""LoRA adapters from peft, in BF16, on a frozen base."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pytest_fp8.said import Told

if TYPE_CHECKING:
    import torch

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The Linears of a Llama block; peft calls this choice "all-linear"."""
ALPHA = 2
"""LoRA's alpha, per rank."""
LEARNING_RATE = 2e-4
"""Adapters start at zero and learn with rates about ten times those of full training (peft's own examples). The rate,
alpha and dropout are in no case's hash: a change of one must raise ``case.DEFINITION``, which a test checks."""


class NoSuchLinear(Told, ValueError):
    """An adapter target names no Linear of the model, or another module as well, which peft refuses."""

    def __init__(self, target: str, names: Sequence[str], others: bool) -> None:
        what = f"{target!r} names not only Linears" if others else f"no Linear is named {target!r}"
        super().__init__(f"{what}; this model has {', '.join(names) or 'none'}")
        self.fp8_next = f"name the model's own Linears: lora_targets={tuple(names[:4])!r}"


def add_adapters(model: torch.nn.Module, rank: int, targets: Sequence[str] = ()) -> torch.nn.Module:
    """``model`` with LoRA matrices of ``rank`` beside each Linear named in ``targets``, all else frozen.

    alpha is proportional to the rank (:data:`ALPHA`) and there is no dropout, so that ranks differ only in size.
    Adapters get the base's dtype; peft's default, float32, would compute them in float32 and cast around each. Call it
    before a conversion, so that the base's Linears are converted under their names with ``base_layer``. Raises
    :class:`NoSuchLinear` where a target names no Linear, or not only Linears.
    """
    import torch
    from peft import LoraConfig, get_peft_model

    linears = {name: isinstance(module, torch.nn.Linear) for name, module in model.named_modules() if name}
    wanted = list(targets or PROJECTIONS)
    for target in wanted:
        found = [linear for name, linear in linears.items() if f".{name}".endswith(f".{target}")]
        if not all(found) or not found:
            raise NoSuchLinear(target, _targets(linears), others=any(found))
    config = LoraConfig(r=rank, lora_alpha=ALPHA * rank, lora_dropout=0.0, target_modules=wanted, task_type=None)
    return get_peft_model(model, config, autocast_adapter_dtype=False)  # type: ignore[no-any-return]


def _targets(linears: Mapping[str, bool]) -> list[str]:
    """The Linears' names by their last parts; whole where another module has the same last part. ``linears``: of each
    module whether it is one."""

    def last(name: str) -> str:
        return name.rpartition(".")[2]

    shared = {last(name) for name, linear in linears.items() if not linear}
    return sorted({name if last(name) in shared else last(name) for name, linear in linears.items() if linear})
