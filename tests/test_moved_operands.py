"""What Linears are given is moved value by value: beside activation checkpointing, and in memory for one step."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from helpers.arms import spec
from pytest_fp8 import Case
from pytest_fp8.worker.server import ArmServer
from pytest_fp8.worker.state.weights import moved_operands

pytestmark = pytest.mark.slow


def square(model, x):
    return model(x).float().square().mean()


def serve(**workload):
    return ArmServer(spec(Case("own", "bf16", "none", emulated=True), **{"loss": square, **workload}))


class Experts(torch.nn.Module):
    """How many rows an expert gets is what a router makes of them, also where they are computed again."""

    def __init__(self):
        super().__init__()
        self.router = torch.nn.Linear(32, 4)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(4))

    def forward(self, x):
        return checkpoint(self.routed, x, use_reentrant=False)

    def routed(self, x):
        chosen, out = self.router(x).argmax(-1), torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero().flatten()
            out = out.index_add(0, rows, expert(x[rows]).relu())
        return out


def test_what_checkpointing_recomputes_is_moved_as_it_was():
    server = serve(build=Experts, batch=lambda step: torch.randn(256, 32))
    found = server.moved("gradients", draws=0, operands=4)
    assert len({each["loss"] for each in found}) == 4


def test_moved_operands_keep_no_factors_for_the_backward_pass():
    server = serve(build=lambda: torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)))
    engine, types = server.engine, []
    batch = engine.training_batch(seed=0, step=0)
    kept = torch.autograd.graph.saved_tensors_hooks(lambda one: types.append(one.dtype) or one, lambda one: one)
    with moved_operands(engine, seed=0), kept:
        engine.model(batch)
    assert {*types} == {torch.bfloat16}


def test_ways_that_do_not_fit_the_memory_uncompiled_are_left_out():
    def short_of_memory(model, x):
        if model._forward_hooks:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return square(model, x)

    server = serve(build=lambda: torch.nn.Linear(32, 32), batch=lambda step: torch.randn(32, 32), loss=short_of_memory)
    found = server.moved("gradients", draws=2, operands=4)
    assert len(found) == 2
    assert server.moved("gradients", draws=2, operands=4) == found
