"""A training loop of one's own: two micro-batches, clipping, a schedule, an evaluation now and then."""

import pytest
import torch
from torch import nn

from pytest_fp8 import Workload

MICRO_BATCHES = 2
EVALUATED_EVERY = 10


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(64, 128)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(2))
        self.leave = nn.Linear(128, 64)

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x)
        return self.leave(x)


def batch(step):
    x = torch.randn(128, 64)
    return {"x": x, "y": x.sin()}


def optimizer(parameters):
    made = torch.optim.AdamW(parameters, lr=1e-3)
    made.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(made, 100)
    return made


def step(model, batch, optimizer, precision):
    """One whole training step. It gives its loss as a tensor: .item() would wait for the GPU."""
    total = 0.0
    for x, y in zip(batch["x"].chunk(MICRO_BATCHES), batch["y"].chunk(MICRO_BATCHES), strict=True):
        with precision():  # Transformer Engine's autocast; nothing with torchao
            loss = (model(x) - y).float().square().mean() / MICRO_BATCHES
        loss.backward()
        total = total + loss.detach()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.scheduler.step()
    optimizer.zero_grad(set_to_none=True)
    optimizer.steps = getattr(optimizer, "steps", 0) + 1
    if optimizer.steps % EVALUATED_EVERY == 0:
        model.eval()
        with torch.no_grad(), precision():
            model(batch["x"])
        model.train()
    return total


def save(model, optimizer, folder):
    """All that training needs to go on, into an empty folder."""
    state = [model.state_dict(), optimizer.state_dict(), optimizer.scheduler.state_dict(), optimizer.steps]
    torch.save(state, folder / "state.pt")


def load(model, optimizer, folder):
    """Puts it into a model and an optimizer of the same kind, in place. The model may be the other precision's."""
    weights, state, schedule, optimizer.steps = torch.load(folder / "state.pt", weights_only=True)
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    optimizer.scheduler.load_state_dict(schedule)


@pytest.fixture
def fp8_workload():
    return Workload(build=Model, batch=batch, step=step, optimizer=optimizer, save=save, load=load)


@pytest.mark.fp8(backend="torchao", recipe="tensorwise", emulated=True, name="loop")
def test_without_a_gpu(fp8_pair):
    fp8_pair.assert_layers()
    fp8_pair.assert_numerics()
    fp8_pair.assert_loss()
    fp8_pair.assert_checkpoints()


@pytest.mark.fp8(backend="torchao", recipe="tensorwise", name="loop")
def test_torchao(fp8_pair):
    fp8_pair.assert_layers()
    fp8_pair.assert_numerics()
    fp8_pair.assert_loss()


@pytest.mark.fp8(backend="transformer_engine", recipe="delayed", name="loop")
def test_transformer_engine(fp8_pair):
    fp8_pair.assert_layers()
    fp8_pair.assert_numerics()
    fp8_pair.assert_loss()
