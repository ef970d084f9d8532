"""What users write otherwise than most: shapes of a loop, set-ups of a model."""

from __future__ import annotations

from collections import deque

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.healthy.sound import (
    Net,
    apart,
    built,
    entry,
    finish,
    of,
    rows,
    sound,
    trained,
    vectors,
)
from pytest_fp8 import Workload

# -- optimizers and schedules -----------------------------------------------------------------------------------------


# No stored state fits a new optimizer that lacks a group, for torch as for these stores.
@sound(questions=("layers", "numerics", "loss"))
def gradual_unfreezing():
    """The step adds a layer's parameters to the optimizer once it unfreezes them."""

    def step(model, batch, optimizer, precision):
        model.seen += 1
        if model.seen > 3 and len(optimizer.param_groups) == 1:
            model.up.requires_grad_(True)
            optimizer.add_param_group({"params": list(model.up.parameters()), "lr": 5e-4})
        return trained(apart)(model, batch, optimizer, precision)

    def build():
        model = Net()
        model.up.requires_grad_(False)
        model.seen = 0
        return model

    def optimizer(parameters):
        return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=1e-3)

    return Workload(build=build, batch=rows, step=step, optimizer=optimizer)


@sound()
def step_looked_up_once():
    """The loop keeps optimizer.step in a variable."""
    known = {}

    def step(model, batch, optimizer, precision):
        with precision():
            loss = apart(model, batch)
        loss.backward()
        known.setdefault(id(optimizer), (optimizer, optimizer.step))[1]()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return Workload(build=Net, batch=rows, step=step)


class Lookahead(torch.optim.Optimizer):
    """Every third step goes back half the way to the slow weights (Zhang et al. 2019)."""

    def __init__(self, optimizer):
        self.optimizer, self.counter = optimizer, 0
        super().__init__(optimizer.param_groups, {})
        self.param_groups = optimizer.param_groups
        self.slow = [[p.detach().clone() for p in group["params"]] for group in self.param_groups]

    def step(self, closure=None):
        loss = self.optimizer.step(closure)
        self.counter += 1
        if self.counter % 3 == 0:
            with torch.no_grad():
                for group, slow in zip(self.param_groups, self.slow, strict=True):
                    for fast, kept in zip(group["params"], slow, strict=True):
                        kept.lerp_(fast, 0.5)
                        fast.copy_(kept)
        return loss


entry(
    "lookahead",
    "An optimizer that wraps another one and keeps slow weights.",
    optimizer=lambda p: Lookahead(torch.optim.AdamW(p, lr=1e-3)),
)


class SAM(torch.optim.Optimizer):
    """With its two halves, first_step() and second_step(), as most copies of it have them."""

    def __init__(self, parameters, rho=0.02):
        super().__init__(parameters, {"rho": rho})
        self.base_optimizer = torch.optim.AdamW(self.param_groups, lr=1e-3)
        self._old = {}
        self.param_groups, self.base_optimizer.state = self.base_optimizer.param_groups, self.state

    def _gradients(self):
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]

    @torch.no_grad()
    def first_step(self):
        size = self.param_groups[0]["rho"] / (torch.nn.utils.get_total_norm([p.grad for p in self._gradients()]) + 1e-6)
        for p in self._gradients():
            self._old[p] = p.detach().clone()
            p.add_(p.grad * size)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for p in self._gradients():
            p.copy_(self._old.pop(p))
        self.base_optimizer.step()
        self.zero_grad()

    def step(self, closure=None):
        raise RuntimeError("SAM has two steps")


@of("step", optimizer=SAM)
def sam_of_two_steps(model, batch, optimizer, precision):
    """SAM, whose step() is never called: the loop calls its two halves."""
    for half in (optimizer.first_step, optimizer.second_step):
        with precision():
            loss = apart(model, batch)
        loss.backward()
        half()
    return loss.detach()


def reptile_optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=2e-3)


@of("step", batch=lambda step: vectors(192), optimizer=reptile_optimizer)
def reptile(model, batch, optimizer, precision):
    """Three inner steps, then the weights go a part of the way (Reptile)."""
    before = [p.detach().clone() for p in model.parameters()]
    total = 0.0
    for part in batch.chunk(3):
        with precision():
            loss = apart(model, part)
        loss.backward()
        finish(optimizer)
        total = total + loss.detach() / 3
    with torch.no_grad():
        for p, old in zip(model.parameters(), before, strict=True):
            p.copy_(old.lerp(p, 0.5))
    return total


class Warmup:
    """A schedule of ten lines, without state_dict() and get_last_lr()."""

    def __init__(self, optimizer, steps):
        self.optimizer, self.steps, self.now = optimizer, steps, 0
        self.step()

    def step(self):
        self.now += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, self.now / self.steps)


@of("optimizer")
def schedule_of_ten_lines(parameters):
    """A learning-rate schedule of a class of the user's own."""
    made = torch.optim.AdamW(parameters, lr=2e-3)
    made.scheduler = Warmup(made, 5)
    return made


# -- models -----------------------------------------------------------------------------------------------------------


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.head = nn.Sequential(nn.Linear(64, 128), nn.GELU()), nn.Linear(128, 64)


@sound()
def step_that_calls_parts():
    """The step calls the parts of the model one after the other."""

    def loss(model, x):
        return (model.head(model.encoder(x)) - x.sin()).float().square().mean()

    return Workload(build=Parts, batch=rows, step=trained(loss))


class Cast(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


@of("build")
def layer_that_casts():
    """A Linear of the user's own that casts its weight to its input's type."""
    model = Net()
    model.up, model.down = Cast(64, 128), Cast(128, 64)
    return model


@built(
    "router_in_float32",
    "A router and a norm that build() left in float32 beside a model in bfloat16.",
    leave=("router",),
)
class Routed(nn.Module):
    """In bfloat16 but for a router and a norm."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.body, self.router, self.norm = Net(), nn.Linear(64, 16), nn.LayerNorm(64)
        self.experts.to(torch.bfloat16)
        self.body.to(torch.bfloat16)

    def forward(self, x):
        share = self.router(self.norm(x.float()))[:, :2].softmax(-1)
        assert share.dtype == torch.float32
        made = sum(share[:, [index]] * expert(x).float() for index, expert in enumerate(self.experts))
        return self.body((x + made).to(x.dtype))


class Remembers(nn.Module):
    """Keeps its last losses, a count by kind, and rows for replay."""

    def __init__(self):
        super().__init__()
        self.net, self.replay = Net(), deque(maxlen=8)
        self.losses, self.counts = [], {"train": 0}

    def forward(self, x):
        self.counts["train"] += 1
        self.losses.append(self.counts["train"])
        self.replay.append(x[:16].detach())
        scale = 1 + 0.01 * len(self.losses)
        return (self.net(torch.cat([x, *self.replay])) * scale)[: len(x)]


# What is in no state_dict() does not survive a resume.
entry(
    "replay_in_the_model",
    "A model that keeps a list, a dict and a queue, and computes with them.",
    build=Remembers,
    case={"questions": ("layers", "numerics", "loss")},
)


# -- weights that are multiplied beside their layers ------------------------------------------------------------------


def _linears(model):
    return [module for module in model.modules() if hasattr(module, "in_features")]


@of("loss")
def orthogonal_penalty(model, x):
    """A penalty on W W^T - I of each Linear, and on probes that meet the weight, as for a spectral norm."""
    total = apart(model, x)
    for layer in _linears(model):
        weight = layer.weight
        square = weight @ weight.t()
        total = total + 1e-3 * (square - torch.eye(len(square), device=x.device)).float().square().mean()
        probes = torch.randn(16, len(square), dtype=weight.dtype, device=x.device)
        total = total + 1e-4 * (probes @ weight).float().square().mean()
    return total


@built("tied_autoencoder", "A decoder that multiplies with its encoder's weight, transposed.")
class Tied(nn.Module):
    """An autoencoder whose decoder is the encoder's weight transposed."""

    def __init__(self):
        super().__init__()
        self.encoder, self.body, self.bias = nn.Linear(64, 128), nn.Linear(128, 128), nn.Parameter(torch.zeros(64))

    def forward(self, x):
        hidden = self.body(F.gelu(self.encoder(x)))
        return F.linear(hidden, self.encoder.weight.t(), self.bias)


@built(
    "quantization_error_in_the_model",
    "The model computes a layer's product in high precision beside FP8's, logs the error and trains on it.",
)
class Watched(Net):
    """Measures in each forward pass how far a layer is from high precision, and penalises it a little."""

    def forward(self, x):
        hidden = self.up(x)
        exact = F.linear(x, self.up.weight, self.up.bias)
        self.error = (exact.detach() - hidden.detach()).float().square().mean()
        hidden = hidden + 0.01 * (exact - hidden)
        return self.last(self.norm(x + self.down(F.gelu(hidden))))


@built("merged_lora", "LoRA that multiplies once, with the merged weight.", leave=("base",))
class Merged(nn.Module):
    """LoRA whose product runs with the merged weight; the frozen Linear holds the base alone."""

    def __init__(self):
        super().__init__()
        self.body, self.base = Net(), nn.Linear(64, 64).requires_grad_(False)
        self.a, self.b = nn.Parameter(0.1 * torch.randn(16, 64)), nn.Parameter(torch.zeros(64, 16))

    def forward(self, x):
        weight = self.base.weight.clone()
        weight += self.b @ self.a
        return F.linear(self.body(x), weight, self.base.bias)


@of("step")
def orthogonal_gradients(model, batch, optimizer, precision):
    """The step makes each gradient orthogonal by products before the optimizer sees it."""
    with precision():
        loss = apart(model, batch)
    loss.backward()
    with torch.no_grad():
        for layer in _linears(model):
            gradient = layer.weight.grad
            square = gradient @ gradient.t() / (gradient.norm().square() + 1e-7)
            layer.weight.grad = 1.5 * gradient - 0.5 * square @ gradient
    finish(optimizer)
    return loss.detach()


class Rests(nn.Module):
    """A body, and a Linear that a later stage of training will call."""

    def __init__(self):
        super().__init__()
        self.body, self.later = Net(), nn.Linear(64, 64)

    def forward(self, x):
        return self.body(x)


@of("loss", build=Rests)
def penalty_on_a_resting_layer(model, x):
    """A penalty on W^T W of a layer that no step calls yet."""
    weight = model.later.weight
    return apart(model, x) + 1e-3 * (weight.t() @ weight).float().square().mean()
