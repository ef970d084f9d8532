"""Habits of research code: state in the model, hooks, random numbers of Python and numpy, weights that are multiplied
beside their layers."""

from __future__ import annotations

import random
from collections import deque

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.healthy import sound
from benchmarks.healthy.sound import apart, classes_of, finish, model, module, of, trained, vectors

# -- two residual blocks ----------------------------------------------------------------------------------------------


@module(lambda: {"norm": nn.LayerNorm(64), "up": nn.Linear(64, 128), "down": nn.Linear(128, 64)})
def Block(self, x):
    return x + self.down(F.gelu(self.up(self.norm(x))))


@module(lambda: {"blocks": nn.ModuleList([Block(), Block()]), "last": nn.Linear(64, 64)})
def Net(self, x):
    for block in self.blocks:
        x = block(x)
    return self.last(x)


def rows(step):
    return vectors(96)


BLOCKS = {"base": Net, "batch": rows}


@model(lambda: {"calls": 0}, **BLOCKS, case={"resume": False})
def counter_in_the_model(self, x):
    """A schedule inside the model: a Python number that each forward pass raises; less noise is added with each."""
    if self.training:
        self.calls += 1
        x = x + torch.randn_like(x) * 0.5 * 0.9**self.calls
    return Net.forward(self, x)


@model(lambda: {"calls": 0}, **BLOCKS, case={"resume": False})
def block_of_every_other_step(self, x):
    """Which layers are used depends on a counter in the model."""
    self.calls += 1
    for block in self.blocks[: 1 + self.calls % 2]:
        x = block(x)
    return self.last(x)


def turns():
    angles = torch.outer(torch.arange(96), torch.exp(-torch.arange(32) / 8))
    return {"turns": torch.polar(torch.ones_like(angles), angles)}


@model(turns, **BLOCKS)
def complex_buffer(self, x):
    """A buffer of complex numbers: rotary places as one product (the first Llama's code)."""
    turned = torch.view_as_complex(x.float().unflatten(-1, (32, 2))) * self.turns
    return Net.forward(self, torch.view_as_real(turned).flatten(-2).to(x.dtype))


@model(**BLOCKS)
def layers_dropped_by_python(self, x):
    """Whole blocks are skipped by random.random() (LayerDrop)."""
    for block in self.blocks:
        if not self.training or random.random() > 0.2:
            x = block(x)
    return self.last(x)


@model(**BLOCKS)
def hook_on_a_tensor(self, x):
    """A hook on a tensor inside the forward pass scales its gradient, where the model trains."""
    h = self.blocks[0](x)
    if self.training:
        h.register_hook(lambda gradient: gradient * 0.5)
    return self.last(self.blocks[1](h))


@of("batch", build=Net)
def augmented_by_numpy(step):
    """The batch is drawn and changed with numpy's global generator."""
    x = np.random.standard_normal((96, 64)).astype(np.float32)
    x[:, np.random.permutation(64)[:8]] = 0
    return torch.from_numpy(x)


def kept():
    model = Net()

    def keep(module, arguments, output):
        model.kept = output

    model.blocks[0].register_forward_hook(keep)
    return model


@of("loss", build=kept, batch=rows)
def features_by_a_hook(model, x):
    """A forward hook on a block keeps its output for a second loss term."""
    return apart(model, x) + 0.1 * model.kept.float().square().mean()


@of("loss", build=Net, batch=rows)
def functional_call(model, x):
    """The forward pass through torch.func.functional_call, with scaled norms."""
    held = {name: p * 1.1 if "norm" in name else p for name, p in model.named_parameters()}
    return apart(lambda x: torch.func.functional_call(model, held, (x,)), x)


@of("step", build=Net, batch=rows)
def autocast_in_the_step(model, batch, optimizer, precision):
    """The user's own torch.autocast around the forward pass."""
    with torch.autocast(batch.device.type, dtype=torch.bfloat16), precision():
        loss = apart(model, batch)
    loss.backward()
    finish(optimizer)
    return loss.detach()


@of("build", batch=rows)
def gradients_changed_by_hooks():
    """Hooks on parameters clip each gradient."""
    model = Net()
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-1, 1))
    return model


@torch.no_grad()
def normalise(model):
    model.last.weight.div_(model.last.weight.norm(dim=1, keepdim=True))
    return model


@of("step", build=lambda: normalise(Net()), batch=rows, learning_rate=4e-3)
def weights_set_after_each_step(model, batch, optimizer, precision):
    """The user's step keeps the last layer's rows at length one."""
    step = trained(lambda model, x: F.cross_entropy(model(x).float(), classes_of(x, 16)))
    loss = step(model, batch, optimizer, precision)
    normalise(model)
    return loss


# -- set-ups of a model -----------------------------------------------------------------------------------------------


def parts():
    return nn.ModuleDict({"encoder": nn.Sequential(nn.Linear(64, 128), nn.GELU()), "head": nn.Linear(128, 64)})


@of("step", build=parts)
def step_that_calls_parts(model, batch, optimizer, precision):
    """The step calls the parts of a model that has no forward pass, one after the other."""
    step = trained(lambda model, x: apart(lambda x: model["head"](model["encoder"](x)), x))
    return step(model, batch, optimizer, precision)


class Cast(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


@of("build")
def layer_that_casts():
    """A Linear of the user's own that casts its weight to its input's type."""
    model = sound.Net()
    model.up, model.down = Cast(64, 128), Cast(128, 64)
    return model


@model(
    lambda: {
        "experts": nn.ModuleList(nn.Linear(64, 64) for _ in range(2)).to(torch.bfloat16),
        "body": sound.Net().to(torch.bfloat16),
        "router": nn.Linear(64, 16),
        "norm": nn.LayerNorm(64),
    },
    leave=("router",),
)
def router_in_float32(self, x):
    """A router and a norm that build() left in float32 beside a model in bfloat16."""
    share = self.router(self.norm(x.float()))[:, :2].softmax(-1)
    assert share.dtype == torch.float32
    made = sum(share[:, [index]] * expert(x).float() for index, expert in enumerate(self.experts))
    return self.body((x + made).to(x.dtype))


# What is in no state_dict() does not survive a resume.
@model(
    lambda: {"net": sound.Net(), "replay": deque(maxlen=8), "losses": [], "counts": {"train": 0}},
    case={"questions": ("layers", "numerics", "loss")},
)
def replay_in_the_model(self, x):
    """A model that keeps a list, a dict and a queue, and computes with them."""
    self.counts["train"] += 1
    self.losses.append(self.counts["train"])
    self.replay.append(x[:16].detach())
    scale = 1 + 0.01 * len(self.losses)
    return (self.net(torch.cat([x, *self.replay])) * scale)[: len(x)]


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


@model(
    lambda: {
        "encoder": nn.Linear(64, 128),
        "body": nn.Linear(128, 128),
        "bias": nn.Parameter(torch.zeros(64)),
    }
)
def tied_autoencoder(self, x):
    """A decoder that multiplies with its encoder's weight, transposed."""
    return F.linear(self.body(F.gelu(self.encoder(x))), self.encoder.weight.t(), self.bias)


@model(base=sound.Net)
def quantization_error_in_the_model(self, x):
    """The model computes a layer's product in high precision beside FP8's, logs the error and trains on it."""
    hidden = self.up(x)
    exact = F.linear(x, self.up.weight, self.up.bias)
    self.error = (exact.detach() - hidden.detach()).float().square().mean()
    hidden = hidden + 0.01 * (exact - hidden)
    return self.last(self.norm(x + self.down(F.gelu(hidden))))


@model(
    lambda: {
        "body": sound.Net(),
        "base": nn.Linear(64, 64).requires_grad_(False),
        "a": nn.Parameter(0.1 * torch.randn(16, 64)),
        "b": nn.Parameter(torch.zeros(64, 16)),
    },
    leave=("base",),
)
def merged_lora(self, x):
    """LoRA that multiplies once, with the merged weight; the frozen Linear holds the base alone."""
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


@module(lambda: {"body": sound.Net(), "later": nn.Linear(64, 64)})
def Rests(self, x):
    return self.body(x)


@of("loss", build=Rests)
def penalty_on_a_resting_layer(model, x):
    """A penalty on W^T W of a layer that no step calls yet."""
    weight = model.later.weight
    return apart(model, x) + 1e-3 * (weight.t() @ weight).float().square().mean()
