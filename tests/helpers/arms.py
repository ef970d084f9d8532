"""A small model of a user's own as an arm on the CPU, whether processes are still there, and cases of two ranks with
gloo."""

from __future__ import annotations

import os
import time
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from pytest_fp8 import Case, Workload
from pytest_fp8.arms.process import ArmProcess
from pytest_fp8.arms.spec import ArmSpec
from pytest_fp8.shipping import ship, unship

CASE = Case(model="own", backend="torchao", recipe="tensorwise", emulated=True, steps=45, seeds=2)


def ends(there, seconds=2.0):
    """Whether something is gone within this time: a process that lost its parent ends."""
    deadline = time.monotonic() + seconds
    while there() and time.monotonic() < deadline:
        time.sleep(0.05)
    return not there()


def users_of(folder):
    """Processes whose environment or output names the folder."""
    found = []
    for process in Path("/proc").iterdir():
        with suppress(OSError):
            outputs = [os.readlink(process / f"fd/{number}") for number in (1, 2)]
            named = os.fsencode(folder) in (process / "environ").read_bytes()
            if named or any(output.startswith(f"{folder}/") for output in outputs):
                found.append(int(process.name))
    return found


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


def fresh_process(request):
    """For a fixture ``fresh``, a process that is no arm yet: a fork, or with the mark ``either_way`` an interpreter of
    its own too."""
    return closing(ArmProcess(fork=getattr(request, "param", True)))


INTERPRETER = pytest.param(False, id="interpreter", marks=pytest.mark.nightly)
either_way = pytest.mark.parametrize("fresh", [INTERPRETER, pytest.param(True, id="fork")], indirect=True)


@contextmanager
def live_arm():
    """The small model as an arm, in a fork."""
    with closing(ArmProcess(fork=True)) as process:
        process.build(spec())
        yield process


def call(arm, function):
    """What ``function()`` gives inside the arm; of several ranks, on the first."""
    return unship(arm.request("call", function=ship(lambda model: function(), "a function")))


def running(pid):
    """Whether a process runs. One that has ended and waits for its parent to notice does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def all_end(*pids, seconds=15):
    """Whether all these processes end within that time."""
    return ends(lambda: any(map(running, pids)), seconds)


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
