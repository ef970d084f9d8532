"""A small model of a user's own as an arm on the CPU, and whether processes are still there."""

from __future__ import annotations

from benchmarks.faults.catalogue import ends
from benchmarks.faults.catalogue import runs as running
from pytest_fp8 import Case, Workload
from pytest_fp8.arms.spec import ArmSpec

CASE = Case(model="own", backend="torchao", recipe="tensorwise", emulated=True, loss_steps=45, loss_seeds=2)


def make_model():
    import torch

    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))


def make_batch(step):
    import torch

    return torch.randn(16, 32)


def square(model, batch):
    return (model(batch) - batch).float().pow(2).mean()


def spec(case=CASE, **changes):
    """``changes``: other functions of the workload, by name."""
    workload = Workload(**{"build": make_model, "batch": make_batch, "loss": square, **changes})
    return ArmSpec(case, "cpu", workload.ship("a test"), threads=1)


def all_end(*pids, seconds=15):
    """Whether all these processes end within that time."""
    return ends(lambda: any(map(running, pids)), seconds)
