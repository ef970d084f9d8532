"""Habits of research code: weights multiplied beside their layers, state in the model, hooks, batches of many kinds."""

from __future__ import annotations

import copy
import random
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.healthy.models import Block
from benchmarks.healthy.sound import (
    Net,
    apart,
    classes_of,
    model,
    module,
    next_byte,
    of,
    text,
    trained,
    vectors,
)
from pytest_fp8 import pad_to_multiple

# -- weights that are multiplied beside their layers ------------------------------------------------------------------


@of("loss")
def orthogonal_penalty(model, x):
    """A penalty on W W^T - I of each Linear, and on probes that meet the weight, as for a spectral norm."""
    total = apart(model, x)
    for layer in (each for each in model.modules() if hasattr(each, "in_features")):
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


@model(base=Net)
def quantization_error_in_the_model(self, x):
    """The model computes a layer's product in high precision beside FP8's, logs the error and trains on it."""
    hidden = self.up(x)
    exact = F.linear(x, self.up.weight, self.up.bias)
    self.error = (exact.detach() - hidden.detach()).float().square().mean()
    hidden = hidden + 0.01 * (exact - hidden)
    return self.last(self.norm(x + self.down(F.gelu(hidden))))


@module(lambda: {"body": Net(), "later": nn.Linear(64, 64)})
def Rests(self, x):
    return self.body(x)


@of("loss", build=Rests)
def penalty_on_a_resting_layer(model, x):
    """A penalty on W^T W of a layer that no step calls yet."""
    weight = model.later.weight
    return apart(model, x) + 1e-3 * (weight.t() @ weight).float().square().mean()


# -- state, hooks and random numbers ----------------------------------------------------------------------------------


@module(lambda: {"blocks": nn.ModuleList([Block(), Block()]), "last": nn.Linear(64, 64)})
def Blocks(self, x):
    for block in self.blocks:
        x = block(x)
    return self.last(x)


@model(lambda: {"calls": 0}, base=Blocks, case={"resume": False})
def block_of_every_other_step(self, x):
    """Which layers are used depends on a counter in the model."""
    self.calls += 1
    for block in self.blocks[: 1 + self.calls % 2]:
        x = block(x)
    return self.last(x)


# What is in no state_dict() does not survive a resume.
@model(
    lambda: {"net": Net(), "replay": deque(maxlen=8), "losses": [], "counts": {"train": 0}},
    case={"questions": ("layers", "numerics", "loss")},
)
def replay_in_the_model(self, x):
    """A model that keeps a list, a dict and a queue, and computes with them."""
    self.counts["train"] += 1
    self.losses.append(self.counts["train"])
    self.replay.append(x[:16].detach())
    scale = 1 + 0.01 * len(self.losses)
    return (self.net(torch.cat([x, *self.replay])) * scale)[: len(x)]


def turns():
    angles = torch.outer(torch.arange(128), torch.exp(-torch.arange(32) / 8))
    return {"net": Net(), "turns": torch.polar(torch.ones_like(angles), angles)}


@model(turns)
def complex_buffer(self, x):
    """A buffer of complex numbers: rotary places as one product (the first Llama's code)."""
    turned = torch.view_as_complex(x.float().unflatten(-1, (32, 2))) * self.turns
    return self.net(torch.view_as_real(turned).flatten(-2).to(x.dtype))


@model(base=Blocks)
def layers_dropped_by_python(self, x):
    """Whole blocks are skipped by random.random() (LayerDrop)."""
    for block in self.blocks:
        if not self.training or random.random() > 0.2:
            x = block(x)
    return self.last(x)


@module(base=Blocks)
def Hooked(self, x):
    h = self.blocks[0](x)
    if self.training:
        h.register_hook(lambda gradient: gradient * 0.5)
    return self.last(self.blocks[1](h))


def hooked():
    model = Hooked()

    def keep(module, arguments, output):
        model.kept = output

    model.blocks[0].register_forward_hook(keep)
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-1, 1))
    return model


@of("loss", build=hooked)
def hooks(model, x):
    """Hooks on a module keep its output for the loss, on a tensor scale its gradient, on parameters clip theirs."""
    return apart(model, x) + 0.1 * model.kept.float().square().mean()


@of("loss", build=Blocks)
def functional_call(model, x):
    """The forward pass through torch.func.functional_call, with scaled norms."""
    held = {name: p * 1.1 if "norm" in name else p for name, p in model.named_parameters()}
    return apart(lambda x: torch.func.functional_call(model, held, (x,)), x)


class Averaged(nn.Module):
    """A student and the moving average of its weights in eval mode, which gives the targets (BYOL, DINO)."""

    def __init__(self):
        super().__init__()
        self.student = Net()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def train(self, mode=True):
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, x, y):
        with torch.no_grad():
            wanted = self.teacher(y)
        return 2 - 2 * F.cosine_similarity(self.student(x).float(), wanted.float(), dim=-1).mean()

    @torch.no_grad()
    def follow(self, rate=0.9):
        for old, new in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            old.lerp_(new, 1 - rate)


# Four copies of each number: there is something to learn about the noise.
@of("step", build=Averaged, batch=lambda step: vectors(128, 16).repeat(1, 4), learning_rate=4e-3)
def moving_average_teacher(model, batch, optimizer, precision):
    """A moving average of the weights, taken in the step, gives the targets: a clean view's for a noisy one."""
    loss = trained(lambda model, x: model(x + torch.randn_like(x), x))(model, batch, optimizer, precision)
    model.follow()
    return loss


@torch.no_grad()
def normalise(model):
    model.last.weight.div_(model.last.weight.norm(dim=1, keepdim=True))
    return model


@of("step", build=lambda: normalise(Blocks()), learning_rate=4e-3)
def weights_set_after_each_step(model, batch, optimizer, precision):
    """The user's step keeps the last layer's rows at length one."""
    step = trained(lambda model, x: F.cross_entropy(model(x).float(), classes_of(x, 16)))
    loss = step(model, batch, optimizer, precision)
    normalise(model)
    return loss


def parts():
    return nn.ModuleDict({"encoder": nn.Sequential(nn.Linear(64, 128), nn.GELU()), "head": nn.Linear(128, 64)})


@of("step", build=parts)
def step_that_calls_parts(model, batch, optimizer, precision):
    """The step calls the parts of a model that has no forward pass, one after the other."""
    step = trained(lambda model, x: apart(lambda x: model["head"](model["encoder"](x)), x))
    return step(model, batch, optimizer, precision)


# -- batches of many kinds ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sample:
    x: Any
    y: Any


class Pair(NamedTuple):
    x: Any
    y: Any


def holders(step):
    from transformers import BatchEncoding

    x = vectors(128)
    edges = torch.sparse_coo_tensor(torch.randint(0, 128, (2, 400)), torch.ones(400), (128, 128)).coalesce()
    return {
        "encoding": BatchEncoding({"samples": deque([Sample(Pair(x, vectors(128)), x.sin())])}),
        "edges": edges,
        "others": {"weights": torch.ones(64), "name": "train", "nothing": None, "rows": np.arange(128)},
        "scale": np.float32(1.0),
        "step": step,
    }


@of("loss", batch=holders)
def batch_of_many_kinds(model, batch):
    """Classes of the user's own, of Python, numpy and transformers, one in another, and a sparse tensor."""
    [sample] = batch["encoding"]["samples"]
    x = sample.x.x + 0.1 * sample.x.y
    x = x + 0.1 * (batch["edges"].float() @ x.float()).to(x.dtype)
    return (model(x) - sample.y).float().square().mean() * float(batch["scale"])


@of("loss", batch=lambda step: torch.nested.nested_tensor([vectors(n) for n in (16, 48, 32, 32)], layout=torch.jagged))
def batch_jagged(model, batch):
    """A jagged tensor of sequences of several lengths; its values go through the model."""
    return apart(model, batch.values())


@of("batch")
def augmented_by_numpy(step):
    """The batch is drawn and changed with numpy's global generator."""
    x = np.random.standard_normal((128, 64)).astype(np.float32)
    x[:, np.random.permutation(64)[:8]] = 0
    return torch.from_numpy(x)


def masked(step):
    made = text(6, 13)
    short = torch.arange(13) >= torch.randint(5, 14, (6, 1))
    made["labels"] = made["labels"].masked_fill(short, -100)
    return pad_to_multiple({**made, "attention_mask": (~short).long()})


@model(
    lambda: {
        "embed": nn.Embedding(256, 64),
        "qkv": nn.Linear(64, 192),
        "out": nn.Linear(64, 64),
        "head": nn.Linear(64, 256),
    },
    batch=masked,
    loss=lambda model, batch: next_byte(lambda ids: model(ids, batch["attention_mask"]), batch),
)
def padded_sequences(self, input_ids, attention_mask):
    """Sequences of several lengths, masked, and padded with pytest_fp8.pad_to_multiple."""
    x = self.embed(input_ids)
    q, k, v = self.qkv(x).chunk(3, -1)
    allowed = attention_mask[:, None, :].bool()
    return self.head(x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)))


def curriculum(step):
    x = vectors(16 * (4 + step % 3)) * (0.5 + 0.01 * min(step, 50))
    return {"x": x, "labels": classes_of(x, 16), "weight": min(1.0, step / 500)}


@of("loss", batch=curriculum, learning_rate=4e-3)
def batches_that_change_with_the_step(model, batch):
    """Their number of rows, their size, and a number in them by which a part of the loss grows."""
    made = model(batch["x"]).float()
    return F.cross_entropy(made, batch["labels"]) + batch["weight"] * F.mse_loss(made, batch["x"].float().sin())
