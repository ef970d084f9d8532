"""How a model is parallelized: DDP, FSDP2, ZeRO-3, or the workload's own way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from pytest_fp8.backends.base import Prepared
from pytest_fp8.codes import R
from pytest_fp8.worker.training.preparation import repeated_blocks
from pytest_fp8.worker.training.setup import TrainingSetup
from pytest_fp8.worker.training.step import WorkloadError
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
    if case.backend.startswith("accelerate_"):
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
        raise WorkloadError(
            R.BAD_PARALLELIZE,
            "parallel='own', and the workload has no parallelize()",
            "the mark asks for the workload's own way to train on several GPUs",
            "Workload(parallelize=function(model, mesh)), or parallel='ddp' or 'fsdp2' in the mark",
        )
    from torch.distributed.fsdp import FullyShardedDataParallel

    names = [name for name, _ in model.named_modules()]
    given = own.parallelize(model, mesh)
    wrapped = model if given is None else given
    if not isinstance(wrapped, torch.nn.Module):
        raise WorkloadError(
            R.BAD_PARALLELIZE,
            f"parallelize() gave a {type(wrapped).__name__}, and no model",
            "it returns more than the model, or something else",
            "return the wrapped model alone, or nothing where the model itself was sharded",
        )
    if any(isinstance(module, FullyShardedDataParallel) for module in wrapped.modules()):
        raise WorkloadError(
            R.BAD_PARALLELIZE,
            "parallelize() gave a FullyShardedDataParallel, which is not covered",
            "FSDP1 holds weights as one flat parameter, in which no layer's weight can be looked at",
            "fully_shard(), which torch has in its place",
        )
    left = {name for name, _ in inner_model(wrapped, model).named_modules()}
    missing = [name for name in names if name not in left]
    if missing and not any(module is model for module in wrapped.modules()):
        raise WorkloadError(
            R.BAD_PARALLELIZE,
            "parallelize() gave another model than the one it was given",
            "it wraps a copy, or builds a model of its own: the weights of this one were set, and converted",
            "wrap the model that parallelize(model, mesh) is given",
        )
    if missing:
        raise WorkloadError(
            R.BAD_PARALLELIZE,
            f"after parallelize() the model has no module {missing[0]!r} ({len(missing)} of {len(names)} are gone)",
            "a module was put into another one there, as checkpoint_wrapper() and torch.compile(layer) do: layers and "
            "weights are known by their names",
            "wrap modules in build(), where the names are not known yet, or in place, as layer.compile() does; "
            "fully_shard() and a wrapper around the whole model keep the names",
        )
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
