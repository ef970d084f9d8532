"""What an arm answers does not depend on what it was asked before."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

pytest.importorskip("torchao")

from helpers.arms import spec
from pytest_fp8 import Case
from pytest_fp8.arms.spec import ArmSpec
from pytest_fp8.plain import to_plain
from pytest_fp8.worker.server import ArmServer

pytestmark = pytest.mark.slow

OPERATIONS = {
    "layers": lambda server: server.layers(),
    "ledger": lambda server: server.ledger(),
    "numerics": lambda server: server.numerics(moved=True),
    "moved gradients": lambda server: server.moved("gradients", draws=1, operands=1),
    "curve": lambda server: server.curve(seed=0, steps=4, watch=True),
    "a curve with noise": lambda server: server.curve(seed=0, steps=4, noise=1),
    "logits": lambda server: [server.restart(7), server.logits(7).hex(), server.moved("outputs", draws=1, seed=7)],
}


class KeepsState(nn.Module):
    """Moves all that a training step can move beside weights, and sends some rows through a second layer."""

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.drop = nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Dropout(0.1)
        self.down, self.gate = nn.Linear(64, 32), nn.Linear(32, 16)
        self.register_buffer("average", torch.zeros(64))
        self.calls, self.history = 0, []

    def forward(self, x):
        self.calls += 1
        self.history.append(self.calls)
        hidden = self.drop(self.norm(self.up(x)).relu()) * (1 + len(self.history) % 3)
        with torch.no_grad():
            self.average.lerp_(hidden.detach().mean(0), 0.1)
        chosen = self.gate(x).softmax(-1).argmax(-1) % 2 == 0
        return torch.where(chosen[:, None], self.down(hidden), x) + self.average.mean()


def step(model, batch, optimizer, precision):
    """Counts its calls on the optimizer, and steps a schedule by itself."""
    optimizer.calls = getattr(optimizer, "calls", 0) + 1
    with precision():
        loss = (model(batch) - batch).float().square().mean() * optimizer.calls**0.1
    loss.backward()
    optimizer.step()
    optimizer.scheduler.step()
    optimizer.zero_grad()
    return loss.detach()


def scheduled(parameters):
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    optimizer.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
    return optimizer


def own(case):
    given = {"build": KeepsState, "batch": lambda step: torch.randn(96, 32), "loss": None, "step": step}
    return spec(case, **given, optimizer=scheduled)


MICRO = Case("micro", "torchao", "tensorwise", lora=8, emulated=True)
OWN = Case("own", "torchao", "tensorwise", emulated=True)


@pytest.mark.parametrize(("model", "is_reference"), [("micro", False), ("own", False), ("own", True)])
def test_answers_are_equal_in_any_order(model, is_reference):
    def answers(draw):
        case = MICRO if model == "micro" else OWN
        case = case.reference() if is_reference else case
        server = ArmServer(ArmSpec(case, "cpu", threads=1) if model == "micro" else own(case))
        order = random.Random(draw).sample(list(OPERATIONS), len(OPERATIONS))
        return {name: to_plain(OPERATIONS[name](server)) for name in order}

    first, *others = map(answers, range(2))
    for other in others:
        assert [name for name in OPERATIONS if repr(first[name]) != repr(other[name])] == []
