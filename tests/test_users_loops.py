"""Loops that are shaped otherwise: steps looked up early, groups added in a step, SAM, schedules of a few lines."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from benchmarks.healthy.users import SAM, Warmup
from pytest_fp8.worker.state.snapshot import muted
from pytest_fp8.worker.training.step import follow, settings_now

pytestmark = pytest.mark.slow


def made(kind=torch.optim.AdamW):
    weight = torch.nn.Parameter(torch.ones(2))
    return weight, kind([weight])


def go(weight, step):
    weight.grad = torch.ones(2)
    step()


def test_a_step_that_was_looked_up_before_is_undone():
    weight, optimizer = made()
    step = optimizer.step
    with muted(optimizer):
        go(weight, step)
    assert weight.tolist() == [1, 1]
    assert not optimizer.state


def test_a_step_that_calls_that_of_its_base_class_is_one_step():
    class Twice(torch.optim.AdamW):
        def step(self, closure=None):
            return super().step(closure)

    torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])  # whose class has hooks from then on
    weight, optimizer = made(Twice)
    seen = []
    with follow(torch.nn.Linear(1, 1), optimizer, lambda name: nullcontext(), lambda: seen.append("step")) as counts:
        go(weight, optimizer.step)
    assert (seen, counts.stepped) == (["step"], 1)


def test_the_step_of_sam_is_its_base_optimizer_s():
    weight, optimizer = made(SAM)
    with follow(torch.nn.Linear(1, 1), optimizer, lambda name: nullcontext()) as counts:
        go(weight, optimizer.first_step)
        go(weight, optimizer.second_step)
    assert counts.stepped == 1
    before = weight.tolist()
    with muted(optimizer):
        go(weight, optimizer.first_step)
        go(weight, optimizer.second_step)
    assert weight.tolist() == before


def test_a_group_that_a_muted_step_adds_is_taken_out_again():
    _, optimizer = made()
    more = torch.nn.Parameter(torch.ones(2))
    with muted(optimizer):
        optimizer.add_param_group({"params": [more]})
    optimizer.add_param_group({"params": [more]})
    assert len(optimizer.param_groups) == 2


def test_a_schedule_without_a_state_is_put_back_by_its_attributes():
    _, optimizer = made()
    optimizer.scheduler = Warmup(optimizer, 5)
    optimizer.scheduler.groups = optimizer.param_groups
    put_back = settings_now(optimizer)
    optimizer.scheduler.step()
    put_back()
    assert optimizer.scheduler.now == 1
    assert optimizer.scheduler.groups is optimizer.param_groups
    assert optimizer.param_groups[0]["lr"] == pytest.approx(4e-4)
