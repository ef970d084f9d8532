"""How several ranks train one model: a class for each value of ``Case.parallel``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from pytest_fp8.backends.base import Prepared
from pytest_fp8.recipes import WAYS
from pytest_fp8.said import WorkloadError

if TYPE_CHECKING:
    import torch


def way(parallel: str) -> Way:
    """The way of ``Case.parallel``; empty: one process."""
    module, _, name = WAYS[parallel].at.partition(":")
    return cast(Way, getattr(import_module(module), name)())


class Way:
    """One process; and what all ways share."""

    is_users = False
    """Its wrapper is the user's, and may have another ``forward`` than the model inside."""

    def join(self, device: torch.device) -> None:
        """Called on each rank once the ranks have met, before the model is built."""

    def parallelize(self, prepared: Prepared, mesh: Callable[[], Any], setup: Any) -> Prepared:
        """The converted and compiled model on the ranks of ``mesh``, before an optimizer is made: FSDP2 puts new
        parameters in place of the model's. ``setup``: a :class:`pytest_fp8.worker.training.setup.TrainingSetup`."""
        return prepared

    def settle(self, model: torch.nn.Module) -> None:
        """After a forward pass without a backward one FSDP2 holds the root's weights unsharded, and would go on with
        these old ones after new weights were loaded."""
        loaded = sys.modules.get("torch.distributed.fsdp")
        if loaded is not None:
            for module in model.modules():
                if isinstance(module, loaded.FSDPModule):
                    module.reshard()

    # -- through Accelerate, which parallelizes the model by itself ---------------------------------------------------

    def accelerator(self, **given: Any) -> Any:
        """An Accelerator of one rank, with its plugin, as ``accelerate launch`` makes it. On a CPU, where Accelerate
        ignores plugins, its state is set as on a GPU."""
        from accelerate import Accelerator

        return Accelerator(**given)

    def prepare(self, accelerator: Any, prepared: Prepared) -> Prepared:
        """What ``accelerator.prepare(model, optimizer)`` makes of these."""
        wrapped, optimizer = accelerator.prepare(prepared.model, prepared.optimizer)
        inner = accelerator.unwrap_model(wrapped, keep_torch_compile=True)
        holder = wrapped if inner is not wrapped else None
        return replace(prepared, model=inner, optimizer=optimizer, backward=accelerator.backward, wrapped=holder)


class Ddp(Way):
    """``DistributedDataParallel``."""

    def parallelize(self, prepared: Prepared, mesh: Callable[[], Any], setup: Any) -> Prepared:
        from torch.nn.parallel import DistributedDataParallel

        return replace(prepared, wrapped=DistributedDataParallel(prepared.model))


class Fsdp2(Way):
    """``fully_shard`` of each repeated block and of the model; through Accelerate of each of the modules that a model
    of transformers names in ``_no_split_modules``."""

    def parallelize(self, prepared: Prepared, mesh: Callable[[], Any], setup: Any) -> Prepared:
        from torch.distributed.fsdp import fully_shard

        from pytest_fp8.worker.training.preparation import repeated_blocks

        on = mesh()
        for block in [*repeated_blocks(prepared.model), prepared.model]:
            fully_shard(block, mesh=on)
        return prepared

    def accelerator(self, **given: Any) -> Any:
        from accelerate import FullyShardedDataParallelPlugin
        from accelerate.utils import DistributedType

        # Accelerate refuses torchao with its loading on rank 0 alone.
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False
        )
        # Set by the plugin, and another way to ask for FSDP.
        os.environ.pop("ACCELERATE_USE_FSDP", None)
        made = super().accelerator(fsdp_plugin=plugin, **given)
        if made.device.type == "cpu":
            plugin.set_mixed_precision(made.mixed_precision)
            made.state.distributed_type, made.state.fsdp_plugin = DistributedType.FSDP, plugin
        return made


class Own(Way):
    """The workload's ``parallelize(model, mesh)``."""

    is_users = True

    def parallelize(self, prepared: Prepared, mesh: Callable[[], Any], setup: Any) -> Prepared:
        import torch

        if setup.own is None or setup.own.parallelize is None:
            raise WorkloadError("no_parallelize")
        model = prepared.model
        names = [name for name, _ in model.named_modules()]
        given = setup.own.parallelize(model, mesh())
        wrapped = model if given is None else given
        if not isinstance(wrapped, torch.nn.Module):
            raise WorkloadError("another_parallelized", kind=type(wrapped).__name__)
        left = {name for name, _ in inner_model(wrapped, model).named_modules()}
        missing = [name for name in names if name not in left]
        if missing and not any(module is model for module in wrapped.modules()):
            raise WorkloadError("another_parallelized", kind=type(wrapped).__name__)
        if missing:
            raise WorkloadError("modules_gone", module=missing[0], gone=len(missing), all=len(names))
        return replace(prepared, wrapped=wrapped)


def inner_model(wrapped: torch.nn.Module, model: torch.nn.Module) -> torch.nn.Module:
    """The model inside ``wrapped`` whose names are the plain ones: ``model`` where it is still there."""
    return model if any(module is model for module in wrapped.modules()) else wrapped
