"""Sound models that strain the numerics question: outliers, a layer called often, routers, normalised depths."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import dropout, silu

from benchmarks.healthy.sound import mlp, module, toward, vectors
from pytest_fp8 import Workload, pad_to_multiple


def scaled():
    scale = torch.ones(128)
    scale[::37] = 200.0
    return {
        "scale": scale,
        "body": nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 128)),
    }


@module(scaled)
def Outliers(self, x):
    """Four of 128 channels are 200 times as large as the others, as in trained language models."""
    return self.body(x * self.scale)


@module(lambda: {"enter": nn.Linear(64, 128), "again": nn.Linear(128, 128), "leave": nn.Linear(128, 64)})
def Often(self, x):
    """One layer called eight times in a step, as in a recurrent net."""
    state = self.enter(x)
    for _ in range(8):
        state = torch.tanh(self.again(state) + state)
    return self.leave(state)


@module(
    lambda: {
        "enter": nn.Linear(64, 64),
        "router": nn.Linear(64, 4),
        "experts": nn.ModuleList(mlp() for _ in range(4)),
    }
)
def Routed(self, x):
    """A router that sends each token to one of four experts: small changes send some another way."""
    x = self.enter(x)
    weights, chosen = self.router(x).float().softmax(-1).max(-1)
    out = torch.zeros_like(x)
    for index, expert in enumerate(self.experts):
        mine = (chosen == index).nonzero().flatten()
        out = out.index_add(0, mine, expert(pad_to_multiple(x[mine]))[: len(mine)])
    return x + weights.to(x.dtype)[:, None] * out


@module(lambda: {"norm": nn.LayerNorm(64), "up": nn.Linear(64, 128), "down": nn.Linear(128, 64)})
def Block(self, x):
    return x + dropout(self.down(silu(self.up(self.norm(x)))), 0.1, self.training)


def deep():
    """Sixteen residual blocks with dropout."""
    return nn.Sequential(*(Block() for _ in range(16)))


def learns(build: Callable[[], nn.Module], rows: int, width: int = 64) -> Callable[[], Workload]:
    """A function that makes the workload of a model that learns to give its input."""
    return lambda: Workload(build=build, batch=lambda step: vectors(rows, width), loss=toward(lambda x: x))


OWN = {
    "outliers": learns(Outliers, 256, 128),
    "often": learns(Often, 64),
    "routed": learns(Routed, 256),
    "deep": learns(deep, 128),
}
"""Name -> the function that makes the workload."""
