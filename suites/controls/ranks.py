"""Controls of arms of several ranks: one rank that does otherwise than the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from controls.control import Control, micro, torch
from controls.ways import fault, plain
from pytest_fp8.case import Case
from pytest_fp8.codes import D, K, L, N, R, S

if TYPE_CHECKING:
    from pytest_fp8.backends.base import Prepared

DDP = micro(gpus=2, parallel="ddp", steps=14, seeds=2)
FSDP2 = micro(gpus=2, parallel="fsdp2", resume=False)
GATHERED = micro(gpus=2, parallel="fsdp2", resume=False, options={"float8_all_gather": True})


def second_rank() -> bool:
    """Whether this process is the one to be broken."""
    import torch.distributed as dist

    return dist.get_rank() == 1


# As a sampler that was seeded by rank does.
fault(
    "rank-other-data",
    D.OTHER_DATA,
    "one rank of the FP8 arm trains on other data",
    training_batch=lambda arm, seed, step, whole=False: arm.setup.training_batch(
        seed + 1000 * second_rank(), step, whole
    ),
    case=DDP,
    question="loss",
)
# FP8 was switched on by a variable that its launcher did not pass on.
fault(
    "rank-in-bf16",
    R.RANKS_DISAGREE,
    "FP8 is off on one rank of two",
    about="rank 1: 0 in FP8",
    layers=lambda arm: arm.fp8_layers() if second_rank() else [],
    forward=lambda arm, layer, own, x: plain(layer, x),
    case=DDP,
    question="layers",
    ends_arms=True,
)


class NotReduced(Control):
    """The step calls the model inside DistributedDataParallel: each rank trains a model of its own."""

    case = DDP

    def parallelize(self) -> Prepared:
        return replace(super().parallelize(), wrapped=self.model)


fault(
    "gradients-not-reduced",
    R.RANKS_DISAGREE,
    "gradients are not reduced over the ranks",
    NotReduced,
    about="gradients are not reduced over all ranks",
    question="loss",
    ends_arms=True,
)
fault("gradients-of-one-step-apart", D.NOT_REDUCED, way=NotReduced, question="numerics", verdicts=("FAIL",))


class Patched(Control):
    """A function of a library is replaced before the arm is built."""

    module, name = "", ""

    def instead(self, own: Callable[..., Any], *given: Any, **more: Any) -> Any:
        """What is called in place of the function ``own``."""

    def build(self) -> None:
        module = import_module(self.module)
        own = getattr(module, self.name)
        setattr(module, self.name, lambda *given, **more: self.instead(own, *given, **more))
        super().build()


# Rank 1 writes zeros in their place, as where only rank 0 saves what it holds.
fault(
    "shard-not-saved",
    K.WEIGHTS_CHANGED,
    "a rank's shards are not in the checkpoint",
    Patched,
    module="torch.distributed.checkpoint",
    name="save",
    instead=lambda arm, own, state, **more: own(
        {name: value * 0 if second_rank() else value for name, value in state.items()}, **more
    ),
    case=FSDP2,
)
# Each rank casts its shards by their own largest magnitude, and the gathered weight is read by its own scale.
fault(
    "amax-group-of-one",
    N.TOO_COARSE,
    "weights' scales are not reduced over the ranks",
    Patched,
    module="torchao.float8.fsdp_utils",
    name="hp_tensor_to_float8_dynamic",
    instead=lambda arm, own, *given, **more: own(*given, **{**more, "reduce_amax": False}),
    case=GATHERED,
)


def _reduced_in_float32(arm: Any, own: Callable[..., Any], module: Any, **more: Any) -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return own(module, **more, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))


# As a script does that gives its policy to one of its two branches.
fault(
    "reduces-in-float32",
    D.OTHER_PRECISION,
    "the FP8 arm alone reduces gradients in float32",
    Patched,
    module="torch.distributed.fsdp",
    name="fully_shard",
    instead=_reduced_in_float32,
    case=FSDP2,
    question="layers",
)


def _plain_parameters(arm: Any, model: Any) -> None:
    for layer in arm.fp8_layers():
        layer.weight = torch.nn.Parameter(layer.weight._tensor)


# Converted weights are plain parameters again before FSDP2 shards them.
fault(
    "bf16-on-the-wire",
    L.GATHERS_BF16,
    "FP8 all-gather gathers BF16",
    converted=_plain_parameters,
    case=GATHERED,
)


def _gathers(arm: Any) -> None:
    part = torch.empty(2**29, dtype=torch.uint8, device=arm.device)
    whole = part.new_empty(arm.case.gpus * part.numel())
    for _ in range(12):
        torch.distributed.all_gather_into_tensor(whole, part)


# 12 GiB, as code does that logs something of every whole weight.
fault(
    "slow-wire",
    S.SLOW_WIRE,
    "the FP8 arm alone gathers after each step",
    stepped=_gathers,
    case=Case("1b", "torchao", "tensorwise", batch=8, gpus=2, parallel="ddp", questions=("speedup",)),
)
