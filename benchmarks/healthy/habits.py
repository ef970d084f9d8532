"""Habits of research code: counters, hooks, numpy's random numbers, complex buffers, functional calls, autocast."""

from __future__ import annotations

import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.healthy.sound import apart, built, classes_of, of, sound, vectors
from pytest_fp8 import Workload


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.last = nn.Linear(64, 64)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def rows(step):
    return vectors(96)


@built(
    "counter_in_the_model",
    "A schedule inside the model: a Python number that each forward pass raises.",
    batch=rows,
    case={"resume": False},
)
class Annealed(Net):
    """Counts its own calls in a Python attribute and adds less noise with each."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        if self.training:
            self.calls += 1
            x = x + torch.randn_like(x) * 0.5 * 0.9**self.calls
        return super().forward(x)


@built("complex_buffer", "A buffer of complex numbers.", batch=rows)
class Turned(Net):
    """Rotary places as one product of complex numbers, from a complex buffer (the first Llama's code)."""

    def __init__(self):
        super().__init__()
        angles = torch.outer(torch.arange(96), torch.exp(-torch.arange(32) / 8))
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles))

    def forward(self, x):
        turned = torch.view_as_complex(x.float().unflatten(-1, (32, 2))) * self.turns
        return super().forward(torch.view_as_real(turned).flatten(-2).to(x.dtype))


@built("layers_dropped_by_python", "Whole blocks are skipped by random.random().", batch=rows)
class Dropping(Net):
    """Skips whole blocks by Python's own random numbers (LayerDrop)."""

    def forward(self, x):
        for block in self.blocks:
            if not self.training or random.random() > 0.2:
                x = block(x)
        return self.last(x)


@of("batch", build=Net)
def augmented_by_numpy(step):
    """The batch is drawn and changed with numpy's global generator."""
    x = np.random.standard_normal((96, 64)).astype(np.float32)
    x[:, np.random.permutation(64)[:8]] = 0
    return torch.from_numpy(x)


def features_by_a_hook_build():
    model = Net()

    def keep(module, arguments, output):
        model.kept = output

    model.blocks[0].register_forward_hook(keep)
    return model


@of("loss", build=features_by_a_hook_build, batch=rows)
def features_by_a_hook(model, x):
    """A forward hook on a block keeps its output for a second loss term."""
    made = model(x)
    return (made - x.sin()).float().square().mean() + 0.1 * model.kept.float().square().mean()


@of("loss", build=Net, batch=rows)
def functional_call(model, x):
    """The forward pass through torch.func.functional_call, with scaled norms."""
    held = {name: p * 1.1 if "norm" in name else p for name, p in model.named_parameters()}
    return (torch.func.functional_call(model, held, (x,)) - x.sin()).float().square().mean()


@of("step", build=Net, batch=rows)
def autocast_in_the_step(model, batch, optimizer, precision):
    """The user's own torch.autocast around the forward pass."""
    with torch.autocast(batch.device.type, dtype=torch.bfloat16), precision():
        loss = apart(model, batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


@sound()
def gradients_changed_by_hooks():
    """Hooks on parameters clip each gradient."""

    def build():
        model = Net()
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-1, 1))
        return model

    return Workload(build=build, batch=rows, loss=apart)


@sound()
def weights_set_after_each_step():
    """The user's step keeps the last layer's rows at length one."""

    def step(model, batch, optimizer, precision):
        with precision():
            logits = model(batch).float()
        loss = F.cross_entropy(logits, classes_of(batch, 16))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        normalise(model)
        return loss.detach()

    @torch.no_grad()
    def normalise(model):
        model.last.weight.div_(model.last.weight.norm(dim=1, keepdim=True))
        return model

    return Workload(build=lambda: normalise(Net()), batch=rows, step=step, learning_rate=4e-3)


@built(
    "block_of_every_other_step",
    "Which layers are used depends on a counter in the model.",
    batch=rows,
    case={"resume": False},
)
class Alternating(Net):
    """Its last block works in every other step alone."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        for block in self.blocks[: 1 + self.calls % 2]:
            x = block(x)
        return self.last(x)


@built("hook_on_a_tensor", "A hook on a tensor inside the forward pass, where the model trains.", batch=rows)
class Scaled(Net):
    """Scales the gradient of what it computes inside, by a hook on the tensor."""

    def forward(self, x):
        h = self.blocks[0](x)
        if self.training:
            h.register_hook(lambda gradient: gradient * 0.5)
        return self.last(self.blocks[1](h))
