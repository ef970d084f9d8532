"""Parameters that are not simply trained Linears: frozen, normed, computed, low-rank, of odd sizes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from benchmarks.healthy.sound import built, classes_of, entry, mlp, of


class Backbone(nn.Module):
    """A backbone and what is put on top of it."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(mlp(), nn.LayerNorm(64), mlp())
        self.top = mlp()

    def forward(self, x):
        return self.top(self.backbone(x))


@built("frozen_backbone", "A frozen backbone, run without gradients, under a trained head.")
class Probe(Backbone):
    def __init__(self):
        super().__init__()
        self.backbone.requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            seen = self.backbone(x)
        return self.top(x + seen)


@of("build")
def partly_frozen():
    """Every second layer and all biases are frozen; gradients pass through."""
    model = Backbone()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("bias" not in name and not name.startswith("backbone.2.0"))
    return model


@of("build")
def frozen_below_the_first_trained():
    """Frozen layers at the input, which need no gradient of their own: part of the products does not run."""
    model = Backbone()
    model.backbone[0].requires_grad_(False)
    return model


@built("weight_normed", "weight_norm on a convolution and on a Linear, which `leave` names.", leave=("normed",))
class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolve = weight_norm(nn.Conv1d(4, 16, 3, padding=1))
        self.normed = weight_norm(nn.Linear(256, 64))
        self.body = mlp()

    def forward(self, x):
        x = self.normed(self.convolve(x.unflatten(1, (4, 16))).relu().flatten(1))
        return x + self.body(x)


def spectrally_normed_critic_build():
    return nn.Sequential(spectral_norm(nn.Linear(64, 64)), nn.LeakyReLU(0.2), mlp(), nn.Linear(64, 16))


@of("loss", build=spectrally_normed_critic_build, leave=("0",))
def spectrally_normed_critic(model, x):
    """spectral_norm moves its vectors in every forward pass; the layers are left in high precision."""
    real, made = model(x).float().mean(1), model(x.flip(1).sin() * 2).float().mean(1)
    return F.relu(1 - real).mean() + F.relu(1 + made).mean()


class LowRank(nn.Module):
    """Adapters as people write them by hand."""

    def __init__(self, inside, outside, rank=16):
        super().__init__()
        self.base = nn.Linear(inside, outside).requires_grad_(False)
        self.a = nn.Parameter(0.1 * torch.randn(inside, rank))
        self.b = nn.Parameter(torch.zeros(rank, outside))

    def forward(self, x):
        return self.base(x) + (x @ self.a) @ self.b


entry(
    "adapters_by_hand",
    "A frozen base and low-rank raw parameters beside it.",
    build=lambda: nn.Sequential(LowRank(64, 128), nn.GELU(), LowRank(128, 64)),
    learning_rate=3e-3,
)


@built(
    "adapters_of_peft",
    "LoRA adapters of peft on a model of the user's own (lora=8 in the mark).",
    learning_rate=1e-2,
    case={"lora": 8, "lora_targets": ("fc1", "fc2")},
)
class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.out = nn.Linear(64, 128), nn.Linear(128, 64), nn.Linear(64, 64)

    def forward(self, x):
        return self.out(x + self.fc2(F.silu(self.fc1(x))))


class Rounded(torch.autograd.Function):
    """Rounds forward, passes the gradient on."""

    @staticmethod
    def forward(ctx, x):
        return (4 * x).round() / 4

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class SquaredProduct(torch.autograd.Function):
    """A product with its own backward pass."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight.T, x.T @ gradient


@built("own_autograd_functions", "A straight-through estimator, and a product whose backward pass is written by hand.")
class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.last = mlp(), nn.Linear(64, 64)
        self.weight = nn.Parameter(0.1 * torch.randn(64, 64))

    def forward(self, x):
        return self.last(SquaredProduct.apply(Rounded.apply(self.body(x)), self.weight))


class Codebook(nn.Module):
    """A vector-quantised bottleneck whose codes are a buffer that the forward pass moves."""

    def __init__(self):
        super().__init__()
        self.encode, self.decode = mlp(), mlp()
        self.register_buffer("codes", torch.randn(32, 64))

    def forward(self, x):
        seen = self.encode(x)
        chosen = torch.cdist(seen.detach().float(), self.codes.float()).argmin(1)
        code = self.codes[chosen]
        if self.training and torch.is_grad_enabled():
            with torch.no_grad():
                self.codes.index_add_(0, chosen, 0.01 * (seen.detach() - code))
        return self.decode(seen + (code - seen).detach()), F.mse_loss(seen.float(), code.float().detach())


@of("loss", build=Codebook)
def moving_codebook(model, x):
    """Buffers that move in the forward pass, chosen by an argmin."""
    made, commitment = model(x)
    return (made - x.sin()).float().square().mean() + 0.25 * commitment


def odd_sizes_build():
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 100), nn.ReLU(), nn.Linear(100, 10))


@of("loss", build=odd_sizes_build, learning_rate=3e-3)
def odd_sizes(model, x):
    """Layers of 50, 100 and 10 features, which FP8 cannot take, between some that it can."""
    return F.cross_entropy(model(x).float(), classes_of(x, 10))
