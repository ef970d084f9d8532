"""DeepSpeed's ZeRO-3: its engine as what a step calls, its optimizer with the methods that an arm uses, its parameters.

Each rank holds a part of every parameter, gradients in buffers of DeepSpeed's own, and master weights in float32.
"""

from __future__ import annotations

import copy
from collections import ChainMap
from collections.abc import Callable, Iterable
from typing import Any

import torch

from pytest_fp8.backends.base import MakeOptimizer

CONFIG: dict[str, Any] = {
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3},
    "zero_allow_untested_optimizer": True,
    "train_micro_batch_size_per_gpu": 1,
    "steps_per_print": 10**9,
}
"""DeepSpeed's defaults otherwise. It uses the size of a batch to print, and nothing else."""


MASTER = "master"
"""Among what the optimizer keeps of a parameter: its weights in float32."""


class GroupOfWhole(ChainMap[str, Any]):
    """A group of the optimizer that DeepSpeed steps, with the model's own parameters in place of DeepSpeed's buffers.
    A setting that is changed here is changed there: a learning rate."""

    def __setitem__(self, key: str, value: Any) -> None:
        if key != "params":
            self.maps[1][key] = value


class ZeroOptimizer(torch.optim.Optimizer):
    """Steps through DeepSpeed's engine. Its groups hold the model's own parameters; its state is that of the buffers,
    float32 parts of several parameters, that DeepSpeed steps."""

    def __init__(self, engine: Any, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {})
        self._engine = engine
        stepped = engine.optimizer.optimizer
        self.state = stepped.state
        self.param_groups = [
            GroupOfWhole({"params": group["params"]}, theirs)  # type: ignore[misc]
            for theirs, group in zip(stepped.param_groups, groups, strict=True)
        ]
        self.scheduler = getattr(stepped, "scheduler", None)
        """The schedule that the workload gave with its optimizer."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self._engine.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._engine.optimizer.zero_grad(set_to_none)

    def _entries(self, parameter: torch.Tensor) -> dict[str, Any]:
        """What it keeps of a parameter, whole and in the host's memory."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        if not parameter.requires_grad:
            return {}
        # Each buffer of parts keeps the same entries: values as many as its own, and the count of steps.
        one: dict[str, Any] = next(iter(self.state.values()), {})
        whole = {MASTER: safe_get_full_fp32_param(parameter).cpu()}
        for entry, value in one.items():
            parts = isinstance(value, torch.Tensor) and value.dim()
            # A count of its own for each parameter: safetensors refuses shared memory.
            whole[entry] = safe_get_full_optimizer_state(parameter, entry).cpu() if parts else copy.deepcopy(value)
        return whole

    def state_dict(self) -> dict[str, Any]:
        """What it keeps of each parameter, whole; on every rank at once. The groups are without parameters."""
        state = {index: self._entries(parameter) for index, parameter in enumerate(self._parameters())}
        return {"state": state, "param_groups": [{**group, "params": []} for group in self.param_groups]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Put that back; on every rank at once."""
        every = self._parameters()
        for index, entries in state_dict["state"].items():
            for entry, value in entries.items():
                self._fill(every[index], entry, value)
        for group, settings in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update(settings)

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _fill(self, parameter: torch.Tensor, entry: str, value: Any) -> None:
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        if entry == MASTER:
            safe_set_full_fp32_param(parameter, value)
            return
        parts = isinstance(value, torch.Tensor) and value.dim()
        # As torch's own load_state_dict() has it: a fused step reads its count on the GPU.
        moved = isinstance(value, torch.Tensor) and any(
            g.get("fused") or g.get("capturable") for g in self.param_groups
        )
        for buffer in self._engine.optimizer.fp32_partitioned_groups_flat:
            one = value.to(buffer.device, copy=True) if moved else copy.deepcopy(value)
            self.state[buffer].setdefault(entry, torch.zeros_like(buffer) if parts else one)
        if parts:
            safe_set_full_optimizer_state(parameter, value, entry)


def zero3(
    model: torch.nn.Module, make_optimizer: MakeOptimizer
) -> tuple[Any, ZeroOptimizer, Callable[[torch.Tensor], None]]:
    """What a training step calls, the optimizer, and what goes backward."""
    import deepspeed

    inner = make_optimizer(model)
    groups = groups_of(inner)
    engine, *_ = deepspeed.initialize(model=model, optimizer=inner, config=CONFIG)
    return engine, ZeroOptimizer(engine, groups), engine.backward


def groups_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Its groups as they were made, with the model's parameters: DeepSpeed puts buffers of its own into them."""
    return [dict(group, params=list(group["params"])) for group in optimizer.param_groups]


def plugin_of_accelerate() -> Any:
    """What an ``Accelerator`` is given for ZeRO-3."""
    from accelerate import DeepSpeedPlugin

    plugin = DeepSpeedPlugin(zero_stage=3, zero3_init_flag=False)
    # Without a DataLoader Accelerate asks for a number. DeepSpeed prints with it, and does nothing else.
    plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 1
    return plugin


def join_accelerate(accelerator: Any, plugin: Any) -> None:
    """Set an Accelerator's state as it sets it on a GPU: on a CPU it ignores the plugin."""
    from accelerate.utils import DistributedType
    from transformers.integrations import unset_hf_deepspeed_config

    if accelerator.device.type == "cpu":
        plugin.set_mixed_precision(accelerator.mixed_precision)
        plugin.select(_from_accelerator_state=True)
        accelerator.state.distributed_type, accelerator.state.deepspeed_plugins = DistributedType.DEEPSPEED, plugin
    # transformers would part each further model as it is built. An arm goes back to the weights of a whole one.
    unset_hf_deepspeed_config()


def prepared_by_accelerate(
    accelerator: Any, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[Any, ZeroOptimizer]:
    """DeepSpeed's engine and optimizer as ``accelerator.prepare(model, optimizer)`` makes them."""
    groups = groups_of(optimizer)
    engine, _ = accelerator.prepare(model, optimizer)
    return engine, ZeroOptimizer(engine, groups)


def compile_no_collectives() -> None:
    """Let ranks on a CPU speak through gloo alone. DeepSpeed would compile collectives through shared memory first,
    which takes a minute on two cores, and fails where there is no compiler."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def settle(model: Any) -> None:
    """After a forward pass without a backward one, weights that DeepSpeed gathers ahead for the backward pass are still
    on their way, and it refuses to fill them."""
    on_their_way = getattr(model, "ds_inflight_param_registry", {})
    for parameter, handle in on_their_way.items():
        handle.wait()
        parameter.partition()
    on_their_way.clear()


def is_partitioned(tensor: Any) -> bool:
    """Whether it is a parameter that ZeRO-3 holds in parts."""
    return hasattr(tensor, "ds_id")


def shape(tensor: torch.Tensor) -> torch.Size:
    """Of the whole tensor."""
    return torch.Size(tensor.ds_shape) if is_partitioned(tensor) else tensor.shape  # type: ignore[attr-defined]


@torch.no_grad()
def whole(parameter: Any) -> torch.Tensor:
    """A partitioned parameter's values; on every rank at once."""
    import deepspeed

    # Small ones are never parted, and inside a layer's forward pass none is.
    if parameter.numel() == parameter.ds_numel:
        return parameter.detach()  # type: ignore[no-any-return]
    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().clone()  # type: ignore[no-any-return]


def gradient(parameter: Any) -> torch.Tensor | None:
    """The whole gradient of a partitioned parameter between backward pass and step; on every rank at once."""
    from deepspeed.utils import safe_get_full_grad

    return safe_get_full_grad(parameter)  # type: ignore[no-any-return]


def part(parameter: Any) -> torch.Tensor:
    """This rank's part of a partitioned parameter's values, flat. It may end with zeros, which fill the last one up."""
    return parameter.ds_tensor  # type: ignore[no-any-return]


def part_of_gradient(parameter: Any) -> torch.Tensor | None:
    """This rank's part of the gradient of a partitioned parameter between backward pass and step, flat."""
    from deepspeed.utils import safe_get_local_grad

    return safe_get_local_grad(parameter)  # type: ignore[no-any-return]


def gradient_norm(parameters: Iterable[Any]) -> torch.Tensor | None:
    """The norm of all ranks' gradients together, between backward pass and step; on every rank at once. ``None`` where
    no parameter is partitioned."""
    held = [parameter for parameter in parameters if is_partitioned(parameter)]
    if not held:
        return None
    squares = part(held[0]).new_zeros((), dtype=torch.float32)
    for parameter in held:
        mine = part_of_gradient(parameter)
        if mine is not None:
            squares += mine.square().sum()
    torch.distributed.all_reduce(squares)
    return squares.sqrt()


@torch.no_grad()
def fill(parameter: Any, value: torch.Tensor) -> None:
    """Give a partitioned parameter, and its master weights, a whole tensor's values; on every rank at once."""
    import deepspeed
    from deepspeed.utils import safe_set_full_fp32_param

    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
        parameter.data.copy_(value)
    safe_set_full_fp32_param(parameter, value.float())
