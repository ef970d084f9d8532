"""Several ranks train one model: the process group, and each rank's part of a batch."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any, TypeVar

import torch

from pytest_fp8.arms.spec import STORE
from pytest_fp8.case import Case
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
