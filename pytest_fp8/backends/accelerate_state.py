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


def sharded_accelerator(cpu: bool, mixed_precision: str, handlers: list[Any]) -> Any:
    """An Accelerator with the plugin for FSDP2, as ``accelerate launch`` makes one. It shards each of the modules that
    a model of transformers names in ``_no_split_modules``.

    On a CPU Accelerate ignores the plugin; there its state is set as it sets it on a GPU.
    """
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import DistributedType

    # Accelerate refuses torchao with its loading on rank 0 alone.
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False
    )
    os.environ.pop("ACCELERATE_USE_FSDP", None)
    accelerator = Accelerator(cpu=cpu, mixed_precision=mixed_precision, fsdp_plugin=plugin, kwargs_handlers=handlers)
    os.environ.pop("ACCELERATE_USE_FSDP", None)
    if cpu:
        plugin.set_mixed_precision(mixed_precision)
        accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
    return accelerator
