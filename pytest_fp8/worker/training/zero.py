"""DeepSpeed's ZeRO-3: its engine as what a step calls, its optimizer with the methods that an arm uses, its parameters.

Each rank holds a part of every parameter, gradients in buffers of DeepSpeed's own, and master weights in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pytest_fp8.case import Case

CONFIG: dict[str, Any] = {
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3},
    "zero_allow_untested_optimizer": True,
    "train_micro_batch_size_per_gpu": 1,
    "steps_per_print": 10**9,
}
"""DeepSpeed's defaults otherwise. It uses the size of a batch to print, and nothing else."""


class ZeroOptimizer(torch.optim.Optimizer):
    """Steps through DeepSpeed's engine; its groups hold the model's own parameters."""

    def __init__(self, engine: Any, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {})
        self._engine = engine
        self.state = engine.optimizer.optimizer.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self._engine.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._engine.optimizer.zero_grad(set_to_none)


def zero3(
    model: torch.nn.Module, case: Case, make_optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer]
) -> tuple[Any, ZeroOptimizer, Callable[[torch.Tensor], None]]:
    """What a training step calls, the optimizer, and what goes backward."""
    import deepspeed

    inner = make_optimizer(model)
    groups = [dict(group, params=list(group["params"])) for group in inner.param_groups]
    engine, *_ = deepspeed.initialize(model=model, optimizer=inner, config=CONFIG)
    return engine, ZeroOptimizer(engine, groups), engine.backward


def is_partitioned(tensor: Any) -> bool:
    """Whether it is a parameter that ZeRO-3 holds in parts."""
    return hasattr(tensor, "ds_id")


def size(parameter: torch.Tensor) -> int:
    """Elements of the whole parameter."""
    return int(parameter.ds_numel) if is_partitioned(parameter) else parameter.numel()  # type: ignore[attr-defined]


@torch.no_grad()
def fill(parameter: Any, value: torch.Tensor) -> None:
    """Give a partitioned parameter, and its master weights, a whole tensor's values; on every rank at once."""
    import deepspeed
    from deepspeed.utils import safe_set_full_fp32_param

    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
        parameter.data.copy_(value)
    safe_set_full_fp32_param(parameter, value.float())
