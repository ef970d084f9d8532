"""DeepSpeed's ZeRO-3: its engine as what a step calls, its optimizer with the methods that an arm uses, its parameters.

Each rank holds a part of every parameter, gradients in buffers of DeepSpeed's own, and master weights in float32.
"""

from __future__ import annotations

import copy
from collections import ChainMap
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from pytest_fp8.backends.base import Prepared
from pytest_fp8.backends.ways import Way
from pytest_fp8.worker.tensors import KINDS, Held

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


class Zero3(Way):
    """DeepSpeed's engine, which makes its optimizer itself, and goes backward itself."""

    def join(self, device: torch.device) -> None:
        """Ranks on a CPU speak through gloo alone. DeepSpeed would compile collectives through shared memory first,
        which takes a minute on two cores, and fails where there is no compiler."""
        import deepspeed

        if device.type == "cpu":
            # Private: no option of DeepSpeed leaves an operator out.
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

    def parallelize(self, prepared: Prepared, mesh: Callable[[], Any], setup: Any) -> Prepared:
        import deepspeed

        inner = setup.optimizer(prepared.model)
        groups = groups_of(inner)
        engine, *_ = deepspeed.initialize(model=prepared.model, optimizer=inner, config=CONFIG)
        return _with(engine, groups, prepared)

    def settle(self, model: torch.nn.Module) -> None:
        """Weights that DeepSpeed gathers ahead for a backward pass that never comes are still on their way, and it
        refuses to fill them."""
        on_their_way = getattr(model, "ds_inflight_param_registry", {})
        for parameter, handle in on_their_way.items():
            handle.wait()
            parameter.partition()
        on_their_way.clear()

    def accelerator(self, **given: Any) -> Any:
        from accelerate import DeepSpeedPlugin
        from accelerate.utils import DistributedType
        from transformers.integrations import unset_hf_deepspeed_config

        plugin = DeepSpeedPlugin(zero_stage=3, zero3_init_flag=False)
        # Without a DataLoader Accelerate asks for a number. DeepSpeed prints with it, and does nothing else.
        plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 1
        made = super().accelerator(deepspeed_plugin=plugin, **given)
        if made.device.type == "cpu":
            plugin.set_mixed_precision(made.mixed_precision)
            # Private: what Accelerate calls on a GPU. A CPU that takes DeepSpeed's plugin would replace it.
            plugin.select(_from_accelerator_state=True)
            made.state.distributed_type, made.state.deepspeed_plugins = DistributedType.DEEPSPEED, plugin
        # transformers would part each further model as it is built. An arm goes back to the weights of a whole one.
        unset_hf_deepspeed_config()
        return made

    def prepare(self, accelerator: Any, prepared: Prepared) -> Prepared:
        """``accelerator.backward()`` would step, too: between these two calls of its, gradients are read here."""
        groups = groups_of(prepared.optimizer)
        engine, _ = accelerator.prepare(prepared.model, prepared.optimizer)
        return _with(engine, groups, prepared)


def groups_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Its groups as they were made, with the model's parameters: DeepSpeed puts buffers of its own into them."""
    return [dict(group, params=list(group["params"])) for group in optimizer.param_groups]


def _with(engine: Any, groups: list[dict[str, Any]], prepared: Prepared) -> Prepared:
    return replace(prepared, optimizer=ZeroOptimizer(engine, groups), backward=engine.backward, wrapped=engine)


class Partitioned(Held):
    """A parameter of which each rank holds a part, flat, which may end with zeros that fill the last one up."""

    is_part = is_ranks_own = True

    @classmethod
    def has(cls, tensor: Any) -> bool:
        return hasattr(tensor, "ds_id")

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.tensor.ds_shape)

    def local(self) -> torch.Tensor:
        return self.tensor.ds_tensor  # type: ignore[no-any-return]

    @torch.no_grad()
    def whole(self) -> torch.Tensor:
        import deepspeed

        # Small ones are never parted, and inside a layer's forward pass none is.
        if self.tensor.numel() == self.tensor.ds_numel:
            return self.tensor.detach()  # type: ignore[no-any-return]
        with deepspeed.zero.GatheredParameters([self.tensor]):
            return self.tensor.detach().clone()  # type: ignore[no-any-return]

    def copied(self) -> torch.Tensor:
        """In the host's memory: the GPU has no room for whole weights."""
        return self.whole().cpu()

    def gradient(self) -> torch.Tensor | None:
        from deepspeed.utils import safe_get_local_grad

        return safe_get_local_grad(self.tensor)  # type: ignore[no-any-return]

    def whole_gradient(self) -> torch.Tensor | None:
        from deepspeed.utils import safe_get_full_grad

        return safe_get_full_grad(self.tensor)  # type: ignore[no-any-return]

    @torch.no_grad()
    def fill(self, value: torch.Tensor) -> None:
        """Its master weights, too."""
        import deepspeed
        from deepspeed.utils import safe_set_full_fp32_param

        with deepspeed.zero.GatheredParameters([self.tensor], modifier_rank=0):
            self.tensor.data.copy_(value)
        safe_set_full_fp32_param(self.tensor, value.float())

    @torch.no_grad()
    def change(self, changed: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.fill(changed(self.whole()))

    def loaded(self, value: torch.Tensor) -> torch.Tensor:
        """DeepSpeed's placeholder, which ``load_state_dict()`` copies to itself."""
        self.fill(value)
        return self.tensor.detach()  # type: ignore[no-any-return]


KINDS.append(Partitioned)
