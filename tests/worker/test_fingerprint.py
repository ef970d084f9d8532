"""The hash of an own model's case: what changes it, what does not, and that an arm's numbers stay as they are."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from pytest_fp8 import Case, Workload
from pytest_fp8.arms.spec import ArmSpec
from pytest_fp8.worker.as_built import VARY
from pytest_fp8.worker.as_built import executed as executed_by
from pytest_fp8.worker.run.engine import Engine

pytestmark = pytest.mark.slow

CASE = Case("own", "torchao", "tensorwise", emulated=True, steps=4)


def build(width=64, kind="Linear", frozen=False, bypass=False, routed=False):
    """A small model. Its options change one thing each that a first step executes."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up = type(kind, (torch.nn.Linear,), {})(32, width)
            self.down = torch.nn.Linear(width, 16)
            self.norm = torch.nn.BatchNorm1d(16)
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            linear = torch.nn.functional.linear
            h = linear(x, self.up.weight, self.up.bias) if bypass else self.up(x)
            h = h[h.mean(1) > 0] if routed else h
            return self.norm(self.down(h) * self.calls)

    model = Model()
    model.up.weight.requires_grad_(not frozen)
    return model


def batch(step, rows=16):
    return torch.randn(rows, 32)


def loss(model, x):
    return model(x).float().square().mean()


def twice(model, x):
    return model(x).float().square().mean() + model(x).float().mean()


def step(model, x, optimizer, precision):
    """A hand-written step whose state, how often it was called, decides what it trains on."""
    optimizer.calls = getattr(optimizer, "calls", 0) + 1
    for part in x.chunk(2):
        loss(model, part * optimizer.calls).backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss(model, x).detach()


def reference(case=CASE, **changes):
    workload = Workload(**{"build": build, "batch": batch, "loss": loss, **changes})
    return ArmSpec(case.reference(), "cpu", workload.ship("a test"), threads=1)


def first_step(spec):
    return Engine(spec).first_step


def executed(spec):
    return executed_by(Engine(spec))


HEALTHY = first_step(reference())


# -- what the first step executes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"build": functools.partial(build, width=128)},
        {"build": functools.partial(build, kind="Other")},
        {"build": functools.partial(build, frozen=True)},
        {"build": functools.partial(build, bypass=True)},
        {"batch": functools.partial(batch, rows=32)},
        {"batch": lambda step: {"x": batch(step)}, "loss": lambda model, x: loss(model, x["x"])},
        {"loss": twice},
        {"step": step},
    ],
    ids=["width", "module class", "frozen", "product", "rows", "batch", "calls", "micro-batches"],
)
def test_what_is_executed_changes_the_hash(changes):
    changed = first_step(reference(**changes))
    assert changed == first_step(reference(**changes)) != HEALTHY


def test_rows_that_follow_from_the_numbers_do_not_count():
    assert executed(reference(build=functools.partial(build, routed=True)))["calls"] == VARY
    assert executed(reference())["calls"] == [
        ["up", True, [[[16, 32], "torch.bfloat16"]]],
        ["down", True, [[[16, 64], "torch.bfloat16"]]],
    ]


def test_evaluation_and_recomputation_are_no_calls_of_a_step():
    def evaluating(model, x, optimizer, precision):
        with torch.no_grad():
            model(x)
        checkpoint(model, x, use_reentrant=False).float().mean().backward()
        optimizer.step()
        return x.new_zeros(())

    assert [name for name, *_ in executed(reference(step=evaluating))["calls"]] == ["up", "down"]


def test_an_fp8_arm_and_a_model_of_ours_tell_none():
    assert first_step(replace(reference(), case=CASE)) == ""
    assert first_step(ArmSpec(Case("micro", "bf16", "none", emulated=True), "cpu")) == ""
