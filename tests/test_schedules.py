"""A schedule at ``optimizer.scheduler``: stepped in every way to train, and at its start again with each curve."""

from __future__ import annotations

from contextlib import closing
from importlib.util import find_spec

import pytest

from helpers.arms import spec
from helpers.ranks import own
from pytest_fp8 import Case
from pytest_fp8.arms.process import ArmProcess

STEPS = 5


def falling(parameters):
    """AdamW's rate falls from 1e-3 to nothing over five steps."""
    from torch import optim

    optimizer = optim.AdamW(parameters, lr=1e-3)
    optimizer.scheduler = optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, STEPS)
    return optimizer


def rates_of(arm, **more):
    answer = arm.request("curve", seed=0, steps=STEPS, **more)
    return [rate for (rate,) in answer["course"]["rates"]], answer["losses"]


def begins_each_curve_anew(arm):
    rates, losses = rates_of(arm)
    assert rates == pytest.approx([1e-3, 8e-4, 6e-4, 4e-4, 2e-4, 0.0], abs=1e-9)
    again, same = rates_of(arm)
    assert again == rates
    assert same == pytest.approx(losses, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torchao", "accelerate_torchao"])
def test_of_one_process(backend):
    with closing(ArmProcess(fork=True)) as arm:
        arm.build(spec(Case("own", backend, "tensorwise", emulated=True), optimizer=falling))
        begins_each_curve_anew(arm)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed")
def test_of_zero3():
    """DeepSpeed steps an optimizer whose groups hold its own buffers."""
    with closing(ArmProcess(fork=True, device="cpu", ranks=2)) as arm:
        arm.build(own("zero3", optimizer=falling))
        begins_each_curve_anew(arm)
