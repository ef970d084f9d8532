"""How a model is parallelized: DDP, FSDP2, ZeRO-3, or the workload's own way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from pytest_fp8.backends.base import Prepared
from pytest_fp8.recipes import backend_type
from pytest_fp8.said import WorkloadError
from pytest_fp8.worker.training.preparation import repeated_blocks
from pytest_fp8.worker.training.setup import TrainingSetup
from pytest_fp8.worker.training.zero import ZeroOptimizer, zero3
from pytest_fp8.workload import Workload


@dataclass(frozen=True)
class Parallel:
    """A model on several ranks, or on one."""

    wrapped: torch.nn.Module
    """What a training step calls: the model itself, or what wraps it."""
    optimizer: torch.optim.Optimizer | None = None
    """Where it is made together with the wrapper."""
    backward: Callable[[torch.Tensor], None] | None = None
    """In place of ``loss.backward()``."""


def parallelized(model: torch.nn.Module, setup: TrainingSetup, prepared: Prepared | None) -> Parallel:
    """Before the optimizer is made, since FSDP2 puts new parameters in place of the model's. ``prepared``: what the
    backend's own conversion gave; Accelerate has parallelized the model there."""
    case = setup.case
    if case.gpus == 1:
        return Parallel(model)
    if backend_type(case.backend).through_accelerate:
        if prepared is None or prepared.wrapped is None:
            return Parallel(model)
        zero = ZeroOptimizer(prepared.wrapped, prepared.groups) if prepared.groups is not None else None
        return Parallel(prepared.wrapped, zero)
    if case.parallel == "zero3":
        return Parallel(*zero3(model, setup.optimizer))
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(setup.device.type, (case.gpus,))
    return Parallel(_WAYS[case.parallel](model, mesh, setup.own))


def _ddp(model: torch.nn.Module, mesh: Any, own: Workload | None) -> torch.nn.Module:
    return torch.nn.parallel.DistributedDataParallel(model)


def _fsdp2(model: torch.nn.Module, mesh: Any, own: Workload | None) -> torch.nn.Module:
    from torch.distributed.fsdp import fully_shard

    for block in repeated_blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _own(model: torch.nn.Module, mesh: Any, own: Workload | None) -> torch.nn.Module:
    if own is None or own.parallelize is None:
        raise WorkloadError("no_parallelize")
    from torch.distributed.fsdp import FullyShardedDataParallel

    names = [name for name, _ in model.named_modules()]
    given = own.parallelize(model, mesh)
    wrapped = model if given is None else given
    if not isinstance(wrapped, torch.nn.Module):
        raise WorkloadError("no_model_parallelized", kind=type(wrapped).__name__)
    if any(isinstance(module, FullyShardedDataParallel) for module in wrapped.modules()):
        raise WorkloadError("fsdp1")
    left = {name for name, _ in inner_model(wrapped, model).named_modules()}
    missing = [name for name in names if name not in left]
    if missing and not any(module is model for module in wrapped.modules()):
        raise WorkloadError("another_parallelized")
    if missing:
        raise WorkloadError("modules_gone", module=missing[0], gone=len(missing), all=len(names))
    return wrapped


_WAYS: dict[str, Callable[[torch.nn.Module, Any, Workload | None], torch.nn.Module]] = {
    "ddp": _ddp,
    "fsdp2": _fsdp2,
    "own": _own,
}


def inner_model(wrapped: torch.nn.Module, model: torch.nn.Module) -> torch.nn.Module:
    """The model inside ``wrapped`` whose names are the plain ones: ``model`` where it is still there."""
    return model if any(module is model for module in wrapped.modules()) else wrapped


def called(engine: Any) -> torch.nn.Module:
    """What a user's loss is called with where nothing trains: a wrapper of the user's own may have another ``forward``
    than the model inside. DDP's has the same, and DeepSpeed's engine counts its calls."""
    wrapped: torch.nn.Module = engine.wrapped if engine.case.parallel == "own" else engine.model
    return wrapped
