"""Controls of arms of several ranks: one rank that does otherwise than the others."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from controls.control import Control, Outcome, micro
from controls.execution import plain_linear
from pytest_fp8.case import Case
from pytest_fp8.codes import D, K, L, N, R, S
from pytest_fp8.errors import ArmError

if TYPE_CHECKING:
    from pytest_fp8.pair import Fp8Pair
    from pytest_fp8.worker.training.parallel import Parallel

DDP = micro(gpus=2, parallel="ddp", steps=14, seeds=2)
FSDP2 = micro(gpus=2, parallel="fsdp2", resume=False)
GATHERED = micro(gpus=2, parallel="fsdp2", resume=False, options={"float8_all_gather": True})


def second_rank() -> bool:
    """Whether this process is the one to be broken."""
    import torch.distributed as dist

    return dist.get_rank() == 1


class OneRankOnOtherData(Control):
    """Rank 1 draws its part of each batch from another seed, as a sampler that was seeded by rank does."""

    number, id = 103, "rank-other-data"
    nightly = True
    title = "one rank of the FP8 arm trains on other data"
    question = "loss"
    code = D.OTHER_DATA
    case = DDP
    verdicts = ("INVALID",)

    def training_batch(self, seed: int, step: int, whole: bool = False) -> Any:
        return super().training_batch(seed + 1000 * second_rank(), step, whole)


class Disagreeing(Control):
    """Ranks that disagree are the arm's error, which each question of the arm ends with."""

    ends_arms = True

    @classmethod
    def ask(cls, pair: Fp8Pair | None) -> Outcome:
        try:
            return super().ask(pair)
        except ArmError as error:
            return Outcome.of_error(cls, error)


class OneRankInBf16(Disagreeing):
    """The layers of rank 1 multiply BF16: FP8 was switched on by a variable that its launcher did not pass on."""

    number, id = 104, "rank-in-bf16"
    title = "FP8 is off on one rank of two"
    question, code, about = "layers", R.RANKS_DISAGREE, "FP8 is off on one of them"
    case = DDP

    def converted(self, model: Any) -> None:
        if second_rank():
            self.with_forward(plain_linear)


class GradientsNotReduced(Disagreeing):
    """The step calls the model inside DistributedDataParallel: each rank trains a model of its own."""

    number, id = 105, "gradients-not-reduced"
    nightly = True
    title = "gradients are not reduced over the ranks"
    question, code, about = "loss", R.RANKS_DISAGREE, "gradients are not reduced over all ranks"
    case = DDP

    def parallelize(self) -> Parallel:
        return replace(super().parallelize(), wrapped=self.model)


class ShardNotSaved(Control):
    """Rank 1 writes zeros in place of its shards, as where only rank 0 saves what it holds."""

    number, id = 106, "shard-not-saved"
    nightly = True
    title = "a rank's shards are not in the checkpoint"
    question = "checkpoints"
    code = K.WEIGHTS_CHANGED
    case = FSDP2

    def build(self) -> None:
        from torch.distributed import checkpoint

        write = checkpoint.save

        def of_zeros(state: dict[str, Any], **more: Any) -> Any:
            return write({name: value * 0 if second_rank() else value for name, value in state.items()}, **more)

        checkpoint.save = of_zeros
        super().build()


class Bf16OnTheWire(Control):
    """Converted weights are plain parameters again before FSDP2 shards them: it gathers them in BF16."""

    number, id = 107, "bf16-on-the-wire"
    nightly = True
    title = "FP8 all-gather gathers BF16"
    question = "layers"
    code = L.GATHERS_BF16
    case = GATHERED

    def converted(self, model: Any) -> None:
        import torch

        for layer in self.fp8_layers():
            layer.weight = torch.nn.Parameter(layer.weight._tensor)


class AmaxGroupOfOne(Control):
    """Each rank casts its shards by their own largest magnitude, and the gathered weight is read by its own scale."""

    number, id = 108, "amax-group-of-one"
    nightly = True
    title = "weights' scales are not reduced over the ranks"
    question = "numerics"
    code = N.TOO_COARSE
    about = "a scale that does not fit"
    case = GATHERED

    def build(self) -> None:
        from torchao.float8 import fsdp_utils

        real = fsdp_utils.hp_tensor_to_float8_dynamic

        def alone(*args: Any, **kwargs: Any) -> Any:
            return real(*args, **{**kwargs, "reduce_amax": False})

        fsdp_utils.hp_tensor_to_float8_dynamic = alone
        super().build()


class SlowWire(Control):
    """After each step the FP8 arm's ranks gather 12 GiB, as code does that logs something of every whole weight."""

    number, id = 109, "slow-wire"
    title = "the FP8 arm alone gathers after each step"
    question = "faster"
    code = S.SLOW_WIRE
    case = Case("1b", "torchao", "tensorwise", batch=8, gpus=2, parallel="ddp", questions=("speedup",))

    def stepped(self) -> None:
        import torch
        import torch.distributed as dist

        part = torch.empty(2**29, dtype=torch.uint8, device=self.device)
        whole = part.new_empty(self.case.gpus * part.numel())
        for _ in range(12):
            dist.all_gather_into_tensor(whole, part)
