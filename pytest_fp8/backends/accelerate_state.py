"""What Accelerate keeps for a whole process: its first Accelerator decides the precision of all later ones."""

from __future__ import annotations

import os
import sys
from typing import Any


def accelerate_precision() -> str:
    """The mixed precision that Accelerate trains in, where this process uses it; else an empty string."""
    state = sys.modules.get("accelerate.state")
    return str(state.AcceleratorState._shared_state.get("_mixed_precision", "")) if state is not None else ""


def forget_accelerate() -> None:
    """Reset Accelerate's state. A process that becomes one arm after another needs each to decide anew."""
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


def make_accelerator(parallel: str, cpu: bool, mixed_precision: str, handlers: list[Any]) -> Any:
    """An Accelerator, of one process or of one of several ranks, as ``accelerate launch`` makes it: with the plugin for
    FSDP2, with DeepSpeed's for ZeRO-3, and with nothing more else.

    FSDP2 shards each of the modules that a model of transformers names in ``_no_split_modules``. On a CPU Accelerate
    ignores both plugins; there its state is set as it sets it on a GPU.
    """
    from accelerate import Accelerator
    from accelerate.utils import DistributedType

    plugins = _plugins(parallel)
    accelerator = Accelerator(cpu=cpu, mixed_precision=mixed_precision, kwargs_handlers=handlers, **plugins)
    for variable in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"):
        os.environ.pop(variable, None)
    state = accelerator.state
    if cpu and parallel == "fsdp2":
        plugins["fsdp_plugin"].set_mixed_precision(mixed_precision)
        state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, plugins["fsdp_plugin"]
    if cpu and parallel == "zero3":
        plugins["deepspeed_plugin"].set_mixed_precision(mixed_precision)
        plugins["deepspeed_plugin"].select(_from_accelerator_state=True)
        state.distributed_type, state.deepspeed_plugins = DistributedType.DEEPSPEED, plugins["deepspeed_plugin"]
    if parallel == "zero3":
        from transformers.integrations import unset_hf_deepspeed_config

        # transformers would part each further model as it is built. An arm goes back to the weights of a whole one.
        unset_hf_deepspeed_config()
    return accelerator


def _plugins(parallel: str) -> dict[str, Any]:
    if parallel == "fsdp2":
        from accelerate import FullyShardedDataParallelPlugin

        # Accelerate refuses torchao with its loading on rank 0 alone.
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False
        )
        os.environ.pop("ACCELERATE_USE_FSDP", None)
        return {"fsdp_plugin": plugin}
    if parallel == "zero3":
        from accelerate import DeepSpeedPlugin

        plugin = DeepSpeedPlugin(zero_stage=3, zero3_init_flag=False)
        # Without a DataLoader Accelerate asks for a number. DeepSpeed prints with it, and does nothing else.
        plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 1
        return {"deepspeed_plugin": plugin}
    return {}
