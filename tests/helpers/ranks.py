"""Cases of two ranks, on a CPU with gloo."""

from __future__ import annotations

from contextlib import closing

from helpers.arms import make_batch, make_model, square
from pytest_fp8 import Case, Workload
from pytest_fp8.arms.process import ArmProcess
from pytest_fp8.arms.spec import ArmSpec


def micro(parallel="", backend="torchao", **more):
    recipe = "none" if backend.endswith("bf16") else "tensorwise"
    several = {"gpus": 2, "parallel": parallel} if parallel else {}
    return Case("micro", backend, recipe, emulated=True, **several, **more)


def own(parallel="ddp", backend="torchao", **functions):
    workload = Workload(**{"build": make_model, "batch": make_batch, "loss": square, **functions})
    case = Case("own", backend, "tensorwise", emulated=True, gpus=2, parallel=parallel, compile=parallel != "zero3")
    return ArmSpec(case, "cpu", workload.ship("a test"), threads=1)


def rank():
    import torch.distributed as dist

    return dist.get_rank()


def two_ranks():
    """Processes of two ranks that are no arm yet, forked, for the time of a ``with``."""
    return closing(ArmProcess(fork=True, device="cpu", ranks=2))
