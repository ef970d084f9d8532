"""What is in memory at a step's peak: the replay on events written by hand, the labels on a real step on the CPU."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from pytest_fp8.questions.layers.products import EVALUATION
from pytest_fp8.questions.memory import ACTIVATIONS, COPIES, GRADIENTS, OPTIMIZER, OTHER, WEIGHTS
from pytest_fp8.worker.record import allocations
from pytest_fp8.worker.record.allocations import Label, StepLabels, at_peak, summed_to

pytestmark = pytest.mark.slow

HELD = {1: 100, 2: 200, 3: 5}
"""Weights, optimizer, a workspace."""
RESIDENT = [Label(0, WEIGHTS, {1}), Label(0, OPTIMIZER, {2})]
FORWARD = [(10, 40), (11, 20), (12, 10), (12, 0)]
"""Two blocks that stay, the second of them in FP8, and one that is held for a moment."""
KEPT = [Label(4, COPIES, {11}), Label(4, ACTIVATIONS, {10, 11})]
BACKWARD = [(20, 30), (11, 0), (21, 15), (10, 0), (11, 50), (11, 0)]
"""A gradient (20), what is held for a moment (21), and another block at an address that was used before."""


@pytest.mark.parametrize(
    ("events", "labels", "uncounted", "kinds"),
    [
        ([], [], [], {WEIGHTS: 100, OPTIMIZER: 200, OTHER: 5}),
        (FORWARD, KEPT, [], {WEIGHTS: 100, OPTIMIZER: 200, OTHER: 15, ACTIVATIONS: 40, COPIES: 20}),
        (
            FORWARD + BACKWARD[:4],
            [*KEPT, Label(8, GRADIENTS, {20})],
            [],
            {WEIGHTS: 100, OPTIMIZER: 200, OTHER: 5, ACTIVATIONS: 40, COPIES: 20, GRADIENTS: 30},
        ),
        # At the later peak the address of a block that was FP8's belongs to one that nothing labels.
        (
            FORWARD + BACKWARD,
            [*KEPT, Label(10, GRADIENTS, {20})],
            [],
            {WEIGHTS: 100, OPTIMIZER: 200, OTHER: 5 + 15 + 50, GRADIENTS: 30},
        ),
        # An evaluation is no training.
        ([(30, 999), (30, 0), *FORWARD[:2]], [], [(0, 2)], {WEIGHTS: 100, OPTIMIZER: 200, OTHER: 65}),
    ],
)
def test_what_is_there_at_the_peak(events, labels, uncounted, kinds):
    assert at_peak(HELD, events, [*RESIDENT, *labels], uncounted) == kinds


@pytest.mark.parametrize(
    ("peak", "kinds"),
    [
        (1000, {WEIGHTS: 700, OTHER: 300}),
        (1010, {WEIGHTS: 700, OTHER: 310}),
        (1060, {}),
    ],
)
def test_the_kinds_add_up_to_what_the_allocator_counted(peak, kinds):
    assert summed_to({WEIGHTS: 700, OTHER: 300}, peak) == kinds


class KeepsFp8(torch.autograd.Function):
    """Keeps its input in FP8 for the backward pass, as FP8 layers do."""

    @staticmethod
    def forward(ctx, given):
        ctx.save_for_backward(given.to(torch.float8_e4m3fn))
        return given.clone()

    @staticmethod
    def backward(ctx, gradient):
        (kept,) = ctx.saved_tensors
        return gradient * kept.to(gradient.dtype)


def test_labels_of_a_real_step():
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU(), torch.nn.Linear(16, 16))
    model[0].copy = {"weight": model[0].weight.detach().to(torch.float8_e4m3fn)}
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 16)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    place = iter(range(1000))
    labels = StepLabels(SimpleNamespace(model=model, optimizer=optimizer), lambda: [(0, 0)] * next(place))
    labels.resident()
    with torch.autograd.graph.saved_tensors_hooks(labels.pack, lambda tensor: tensor):
        with labels.phase("forward"):
            loss = KeepsFp8.apply(model(torch.ones(4, 16))).sum()
        with labels.phase("backward"):
            loss.backward()
    labels.gradients()
    with labels.phase(EVALUATION), torch.no_grad():
        model(torch.ones(4, 16))

    def addresses(tensors):
        return {tensor.untyped_storage().data_ptr() for tensor in tensors}

    found = [(label.kind, label.addresses) for label in labels.labels]
    states = [value for state in optimizer.state.values() for value in state.values()]
    assert found[:3] == [
        (COPIES, addresses([model[0].copy["weight"]])),
        (WEIGHTS, addresses(model.parameters())),
        (OPTIMIZER, addresses(states)),
    ]
    assert [kind for kind, _ in found[3:]] == [COPIES, ACTIVATIONS, GRADIENTS]
    assert len(found[3][1]) == 1, "the one tensor that autograd keeps in FP8"
    assert found[5][1] == addresses(parameter.grad for parameter in model.parameters())
    assert [label.after for label in labels.labels] == sorted(label.after for label in labels.labels)
    assert len(labels.uncounted) == 1


@pytest.mark.parametrize(
    ("raised", "peak", "kinds"),
    [
        (None, 1540, {WEIGHTS: 512, OTHER: 1028}),
        (RuntimeError("torch.func.grad does not support saved tensor hooks"), 1540, {}),
        (torch.OutOfMemoryError("none left"), 1540, "raised"),
    ],
)
def test_a_step_that_cannot_be_watched_has_no_kinds(monkeypatch, raised, peak, kinds):
    model = torch.nn.Linear(4, 4, bias=False)
    # A weight and a block that the forward pass leaves.
    history = {model.weight.untyped_storage().data_ptr(): 512}, lambda: [(7, 1024)]
    monkeypatch.setattr(allocations, "allocator_history", lambda: nullcontext(history))

    def step(batch, phase, on_gradients):
        if raised is not None:
            raise raised
        with phase("forward"):
            model(batch)

    engine = SimpleNamespace(
        model=model, optimizer=torch.optim.SGD(model.parameters()), step=step, synchronize=lambda: None
    )
    if kinds == "raised":
        with pytest.raises(torch.OutOfMemoryError):
            allocations.kinds_at_peak(engine, torch.ones(2, 4), peak)
    else:
        assert allocations.kinds_at_peak(engine, torch.ones(2, 4), peak) == kinds
