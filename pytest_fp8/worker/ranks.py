"""Several ranks train one model: the process group, each rank's part of a batch, and how the model is parallelized."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from pytest_fp8.case import Case
from pytest_fp8.worker.preparation import repeated_blocks
from pytest_fp8.worker.step import WorkloadError
from pytest_fp8.workload import Workload
from pytest_fp8.zoo.batch import with_tensors

COLLECTIVE_SECONDS = 240
"""How long a collective waits for the other ranks. Less than a request may take, so that a rank that waits for one that
hangs says where, before the arm is ended."""

UNCOMPILED = 2
"""Activations of an uncompiled step over those of a compiled one, roughly and rather too much."""


def join(case: Case, device: torch.device) -> torch.device:
    """Become the rank that the environment says, as under ``torchrun``; gives this rank's device. A case on one GPU
    stays as it is, also where pytest itself runs under ``torchrun``."""
    if case.gpus == 1:
        return device
    import torch.distributed as dist

    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=timedelta(seconds=COLLECTIVE_SECONDS)
        )
    if dist.get_world_size() != case.gpus:
        raise RuntimeError(f"this process is one of {dist.get_world_size()} ranks, and the case has {case.gpus}")
    return device


def rank() -> int:
    """This process's rank; 0 where it is alone."""
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def ranks() -> int:
    """How many there are."""
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def wait_for_all() -> None:
    """Return when every rank has come here. On the CPU, so that no GPU works for it."""
    if ranks() > 1:
        torch.distributed.all_reduce(torch.zeros(1))


def uncompiled_step_fits(case: Case, device: torch.device) -> bool:
    """Whether on every rank more memory is free than twice what a step has needed so far. True for an arm on one GPU,
    which may try."""
    if case.gpus == 1 or device.type != "cuda":
        return True
    import torch.distributed as dist

    needed = UNCOMPILED * (torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated())
    fits = torch.tensor(float(torch.cuda.mem_get_info()[0] > needed))
    dist.all_reduce(fits, dist.ReduceOp.MIN)
    return bool(fits)


def part_of(case: Case, batch: Any) -> Any:
    """This rank's sequences of a batch of the suite's: so many steps of N ranks are those of one GPU."""
    if case.gpus == 1:
        return batch
    here = rank()
    return with_tensors(batch, lambda tensor: tensor.chunk(case.gpus)[here].contiguous())


def parallelized(model: torch.nn.Module, case: Case, device: torch.device, own: Workload | None) -> torch.nn.Module:
    """What a training step calls: the model itself, or what wraps it. Before the optimizer is made, since FSDP2 puts
    new parameters in place of the model's."""
    if case.gpus == 1:
        return model
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(device.type, (case.gpus,))
    return _WAYS[case.parallel](model, mesh, own)


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
            "parallel='own', and the workload has no parallelize()",
            "the mark asks for the workload's own way to train on several GPUs",
            "Workload(parallelize=function(model, mesh)), or parallel='ddp' or 'fsdp2' in the mark",
        )
    given = own.parallelize(model, mesh)
    return model if given is None else given


_WAYS: dict[str, Callable[[torch.nn.Module, Any, Workload | None], torch.nn.Module]] = {
    "ddp": _ddp,
    "fsdp2": _fsdp2,
    "own": _own,
}


def inner_model(wrapped: torch.nn.Module, model: torch.nn.Module) -> torch.nn.Module:
    """The model inside ``wrapped`` whose names are the plain ones: ``model`` where it is still there."""
    return model if any(module is model for module in wrapped.modules()) else wrapped


def reshard(model: torch.nn.Module) -> None:
    """After a forward pass without a backward one, FSDP2 holds the root's weights unsharded, and would go on with these
    old ones after new weights were loaded."""
    loaded = sys.modules.get("torch.distributed.fsdp")
    if loaded is not None:
        for module in model.modules():
            if isinstance(module, loaded.FSDPModule):
                module.reshard()
