"""Controls of arms of several ranks: one rank that does otherwise than the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from controls.control import Control, control, micro, torch
from controls.ways import plain
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


class NotReduced(Control):
    """The step calls the model inside DistributedDataParallel: each rank trains a model of its own."""

    case = DDP

    def parallelize(self) -> Prepared:
        return replace(super().parallelize(), wrapped=self.model)


def _saves_zeros(arm: Any, own: Callable[..., Any], state: Any, **more: Any) -> Any:
    """In place of rank 1's values, as where only rank 0 saves what it holds."""
    return own({name: value * 0 if second_rank() else value for name, value in state.items()}, **more)


def _own_amax(arm: Any, own: Callable[..., Any], *given: Any, **more: Any) -> Any:
    """Each rank casts its shards by their own largest magnitude; the gathered weight is read by each rank's scale."""
    return own(*given, **{**more, "reduce_amax": False})


def _reduced_in_float32(arm: Any, own: Callable[..., Any], module: Any, **more: Any) -> Any:
    """As a script does that gives its policy to one of its two branches."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return own(module, **more, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))


def _plain_parameters(arm: Any, model: Any) -> None:
    """Converted weights are plain parameters again before FSDP2 shards them."""
    for layer in arm.fp8_layers():
        layer.weight = torch.nn.Parameter(layer.weight._tensor)


def _gathers(arm: Any) -> None:
    """12 GiB, as code does that logs something of every whole weight."""
    part = torch.empty(2**29, dtype=torch.uint8, device=arm.device)
    whole = part.new_empty(arm.case.gpus * part.numel())
    for _ in range(12):
        torch.distributed.all_gather_into_tensor(whole, part)


# As a sampler that was seeded by rank does.
control("rank-other-data", D.OTHER_DATA, "one rank has other data")(
    question="loss", draws=lambda arm, seed, step: (seed + 1000 * second_rank(), step), case=DDP
)
# FP8 was switched on by a variable that its launcher did not pass on.
control("rank-in-bf16", R.RANKS_DISAGREE, "FP8 is off on one rank of two")(
    about="rank 1: 0 in FP8",
    layers=lambda arm: arm.fp8_layers() if second_rank() else [],
    forward=lambda arm, layer, own, x: plain(layer, x),
    case=DDP,
    question="layers",
    ends_arms=True,
)
control("gradients-not-reduced", R.RANKS_DISAGREE, "gradients are not reduced over the ranks")(
    NotReduced, about="gradients are not reduced over all ranks", question="loss", ends_arms=True
)
control("gradients-of-one-step-apart", D.NOT_REDUCED)(NotReduced, question="numerics", verdicts=("FAIL",))
control("shard-not-saved", K.WEIGHTS_CHANGED, "a rank's shards are not in the checkpoint")(
    patches="torch.distributed.checkpoint.save", instead=_saves_zeros, case=FSDP2
)
control("amax-group-of-one", N.TOO_COARSE, "weights' scales are not reduced over the ranks")(
    patches="torchao.float8.fsdp_utils.hp_tensor_to_float8_dynamic", instead=_own_amax, case=GATHERED
)
control("reduces-in-float32", D.OTHER_PRECISION, "the FP8 arm alone reduces gradients in float32")(
    patches="torch.distributed.fsdp.fully_shard", instead=_reduced_in_float32, case=FSDP2
)
control("bf16-on-the-wire", L.GATHERS_BF16, "FP8 all-gather gathers BF16")(converted=_plain_parameters, case=GATHERED)
control("slow-wire", S.SLOW_WIRE, "the FP8 arm alone gathers after each step")(
    stepped=_gathers, case=Case("1b", "torchao", "tensorwise", batch=8, gpus=2, parallel="ddp", questions=("speedup",))
)
