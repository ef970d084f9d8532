"""Several ranks train one model: the process group, each rank's part of a batch, how the model is parallelized."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch

from pytest_fp8.arms.spec import STORE
from pytest_fp8.backends import zero
from pytest_fp8.backends.base import MakeOptimizer, Prepared
from pytest_fp8.case import Case
from pytest_fp8.recipes import backend_type
from pytest_fp8.said import WorkloadError
from pytest_fp8.worker.training.preparation import repeated_blocks
from pytest_fp8.workload import Workload
from pytest_fp8.zoo.batch import with_tensors

T = TypeVar("T")
COLLECTIVE_SECONDS = 3600
"""How long a collective waits for the other ranks. Longer than pytest waits for an answer: it looks at all ranks, and
tells the one that hangs from those that wait for it."""


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
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            init_method=f"file://{os.environ[STORE]}",
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            timeout=timedelta(seconds=COLLECTIVE_SECONDS),
        )
    if dist.get_world_size() != case.gpus:
        raise RuntimeError(f"this process is one of {dist.get_world_size()} ranks, and the case has {case.gpus}")
    if case.parallel == "zero3" and device.type == "cpu":
        zero.compile_no_collectives()
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


def every_rank_s(value: T) -> list[T]:
    """Plain data of every rank, in their order."""
    if ranks() == 1:
        return [value]
    found: list[Any] = [None] * ranks()
    torch.distributed.all_gather_object(found, value)
    return found


def share_buffers(model: torch.nn.Module) -> None:
    """Give every rank rank 0's buffers, as DDP does before a forward pass: running statistics are each rank's own, and
    a checkpoint holds one copy."""
    if ranks() == 1:
        return
    for buffer in model.buffers():
        if type(buffer) is torch.Tensor and buffer.numel():
            # As bytes: collectives do not take every type.
            mine = buffer.detach().contiguous().reshape(-1).view(torch.uint8)
            torch.distributed.broadcast(shared := mine.clone(), src=0)
            if not torch.equal(shared, mine):
                buffer.detach().copy_(shared.view(buffer.dtype).view(buffer.shape))


def part_of(case: Case, batch: Any) -> Any:
    """This rank's sequences of a batch of the suite's: so many steps of N ranks are those of one GPU."""
    if case.gpus == 1:
        return batch
    here = rank()
    return with_tensors(batch, lambda tensor: tensor.chunk(case.gpus)[here].contiguous())


def reshard(model: torch.nn.Module) -> None:
    """After a forward pass without a backward one, FSDP2 holds the root's weights unsharded, and would go on with these
    old ones after new weights were loaded; ZeRO-3 gathers weights ahead."""
    zero.settle(model)
    loaded = sys.modules.get("torch.distributed.fsdp")
    if loaded is not None:
        for module in model.modules():
            if isinstance(module, loaded.FSDPModule):
                module.reshard()


def forget_aborted(model: torch.nn.Module) -> bool:
    """After an exception inside a forward pass FSDP2 would hold weights unsharded for good. False where torch cannot
    help that: before 2.13."""
    loaded = sys.modules.get("torch.distributed.fsdp")
    inside: set[torch.nn.Module] = set()
    if loaded is None:
        return True
    for module in model.modules():
        if isinstance(module, loaded.FSDPModule) and module not in inside:
            if not hasattr(module, "reset_iter_state"):
                return False
            module.reset_iter_state()
            inside.update(module.modules())
    return True


# -- how the model is parallelized -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parallel:
    """A model on several ranks, or on one."""

    wrapped: torch.nn.Module
    """What a training step calls: the model itself, or what wraps it."""
    optimizer: torch.optim.Optimizer | None = None
    """Where it is made together with the wrapper."""
    backward: Callable[[torch.Tensor], None] | None = None
    """In place of ``loss.backward()``."""


def parallelized(
    case: Case,
    model: torch.nn.Module,
    device: torch.device,
    own: Workload | None,
    make_optimizer: MakeOptimizer,
    prepared: Prepared | None,
) -> Parallel:
    """Before the optimizer is made, since FSDP2 puts new parameters in place of the model's. ``prepared``: what the
    backend's own conversion gave; Accelerate has parallelized the model there."""
    if case.gpus == 1:
        return Parallel(model)
    if backend_type(case.backend).through_accelerate:
        return Parallel(model if prepared is None or prepared.wrapped is None else prepared.wrapped)
    if case.parallel == "zero3":
        return Parallel(*zero.zero3(model, make_optimizer))
    if case.parallel == "ddp":
        return Parallel(torch.nn.parallel.DistributedDataParallel(model))
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (case.gpus,))
    if case.parallel == "own":
        return Parallel(_own(model, mesh, own))
    for block in [*repeated_blocks(model), model]:
        fully_shard(block, mesh=mesh)
    return Parallel(model)


def _own(model: torch.nn.Module, mesh: Any, own: Workload | None) -> torch.nn.Module:
    if own is None or own.parallelize is None:
        raise WorkloadError("no_parallelize")
    names = [name for name, _ in model.named_modules()]
    given = own.parallelize(model, mesh)
    wrapped = model if given is None else given
    if not isinstance(wrapped, torch.nn.Module):
        raise WorkloadError("another_parallelized", kind=type(wrapped).__name__)
    left = {name for name, _ in inner_model(wrapped, model).named_modules()}
    missing = [name for name in names if name not in left]
    if missing and not any(module is model for module in wrapped.modules()):
        raise WorkloadError("another_parallelized", kind=type(wrapped).__name__)
    if missing:
        raise WorkloadError("modules_gone", module=missing[0], gone=len(missing), all=len(names))
    return wrapped


def inner_model(wrapped: torch.nn.Module, model: torch.nn.Module) -> torch.nn.Module:
    """The model inside ``wrapped`` whose names are the plain ones: ``model`` where it is still there."""
    return model if any(module is model for module in wrapped.modules()) else wrapped


def called(engine: Any) -> torch.nn.Module:
    """What a user's loss is called with where nothing trains: a wrapper of the user's own may have another ``forward``
    than the model inside. DDP's has the same, and DeepSpeed's engine counts its calls."""
    wrapped: torch.nn.Module = engine.wrapped if engine.case.parallel == "own" else engine.model
    return wrapped
