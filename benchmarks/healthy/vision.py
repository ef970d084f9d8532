"""Pictures: convolutions, patches, autoencoders, diffusion."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.healthy.sound import mlp, model, module, pictures


def classify(model, batch):
    return F.cross_entropy(model(batch["pixels"]).float(), batch["labels"])


picture = partial(model, batch=lambda step: pictures(), loss=classify)
"""Enter a model that classifies sixteen pictures a step."""


@module(
    lambda channels: {
        "convolve": nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2)),
        "norms": nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2)),
    }
)
def Residual(self, x):
    y = self.norms[0](self.convolve[0](x)).relu()
    return (x + self.norms[1](self.convolve[1](y))).relu()


@model(
    lambda: {
        "blocks": nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), Residual(16), nn.MaxPool2d(2), Residual(16)),
        "hidden": nn.Linear(16 * 8 * 8, 128),
        "head": nn.Linear(128, 10),
    },
    batch=lambda step: pictures(64),
    loss=classify,
    learning_rate=2e-4,
)
def convolution_net(self, x):
    """A residual convolution net with BatchNorm; two Linears at its end."""
    return self.head(self.hidden(self.blocks(x).flatten(1)).relu())


@module(
    lambda width: {
        "norms": nn.ModuleList(nn.LayerNorm(width) for _ in range(2)),
        "qkv": nn.Linear(width, 3 * width),
        "out": nn.Linear(width, width),
        "mlp": mlp(width, 2 * width, width),
    }
)
def Attending(self, x):
    q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
    x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
    return x + self.mlp(self.norms[1](x))


@picture(
    lambda: {
        "patches": nn.Conv2d(3, 64, 4, stride=4),
        "first": nn.Parameter(torch.zeros(1, 1, 64)),
        "places": nn.Parameter(0.02 * torch.randn(1, 17, 64)),
        "blocks": nn.Sequential(Attending(64), Attending(64)),
        "classifier": nn.Linear(64, 10),
    }
)
def vision_transformer(self, pixels):
    """A vision transformer with a convolution for its patches, a class token, an odd number of places."""
    x = self.patches(pixels).flatten(2).transpose(1, 2)
    return self.classifier(self.blocks(torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.places)[:, 0])


@picture(
    lambda: {
        "patches": nn.Conv2d(3, 64, 4, stride=4),
        "across": mlp(16, 64, 16),
        "along": mlp(64, 128, 64),
        "norms": nn.ModuleList([nn.LayerNorm(64), nn.LayerNorm(64)]),
        "head": nn.Linear(64, 10),
    }
)
def mlp_mixer(self, pixels):
    """Linears along places and along channels in turn; 16 places are the smallest size that FP8 takes."""
    x = self.patches(pixels).flatten(2).transpose(1, 2)
    x = x + self.across(self.norms[0](x).transpose(1, 2).contiguous()).transpose(1, 2)
    return self.head((x + self.along(self.norms[1](x))).mean(1))


@picture(
    lambda: {
        "stem": nn.Conv2d(3, 32, 2, stride=2),
        "depthwise": nn.Conv2d(32, 32, 7, padding=3, groups=32),
        "norm": nn.LayerNorm(32),
        "mlp": mlp(32, 128, 32),
        "scale": nn.Parameter(0.1 * torch.ones(32)),
        "head": nn.Linear(256, 10),
    }
)
def convnext(self, x):
    """Depthwise convolutions beside Linears whose input has four dimensions."""
    x = self.stem(x)
    x = x + (self.scale * self.mlp(self.norm(self.depthwise(x).permute(0, 2, 3, 1)))).permute(0, 3, 1, 2)
    return self.head(x.mean(3).flatten(1))


def evidence_lower_bound(model, batch):
    """Summed over pixels and averaged over pictures, as papers do: some hundreds."""
    made, mean, spread = (part.float() for part in model(batch["pixels"]))
    apart = (made - batch["pixels"].float()).square().flatten(1).sum(1)
    divergence = -0.5 * (1 + spread - mean.square() - spread.exp()).sum(1)
    return (apart + divergence).mean()


@model(
    lambda: {
        "encode": nn.Sequential(nn.Conv2d(3, 16, 4, 2, 1), nn.SiLU(), nn.Flatten(), nn.Linear(1024, 128), nn.SiLU()),
        "mean": nn.Linear(128, 16),
        "spread": nn.Linear(128, 16),
        "decode": nn.Sequential(nn.Linear(16, 1024), nn.SiLU(), nn.Unflatten(1, (16, 8, 8))),
        "pixels": nn.ConvTranspose2d(16, 3, 4, 2, 1),
    },
    batch=lambda step: pictures(),
    loss=evidence_lower_bound,
    learning_rate=3e-3,
)
def variational_autoencoder(self, x):
    """A loss of several hundreds (a sum over pixels), transposed convolutions, noise drawn in the forward pass."""
    hidden = self.encode(x)
    mean, spread = self.mean(hidden), self.spread(hidden)
    drawn = mean + torch.randn_like(mean) * (0.5 * spread).exp()
    return self.pixels(self.decode(drawn)), mean, spread


def denoise(model, batch):
    x = batch["pixels"]
    t = torch.randint(1, 1000, (len(x),), device=x.device)
    noise = torch.randn_like(x)
    keep = torch.cos(t / 1000 * torch.pi / 2).to(x.dtype)[:, None, None, None]
    return F.mse_loss(model(keep * x + (1 - keep.square()).sqrt() * noise, t).float(), noise.float())


@model(
    lambda: {
        "time": nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 32)),
        "enter": nn.Conv2d(3, 32, 3, padding=1),
        "down": nn.Conv2d(32, 32, 4, 2, 1),
        "up": nn.ConvTranspose2d(32, 32, 4, 2, 1),
        "norm": nn.GroupNorm(4, 32),
        "qkv": nn.Linear(32, 96),
        "out": nn.Linear(32, 32),
        "leave": nn.Conv2d(64, 3, 3, padding=1),
    },
    batch=lambda step: pictures(),
    loss=denoise,
)
def diffusion(self, x, t):
    """Noise is predicted (a squared error) by a U-net that is told the time; time and noise are drawn in the loss."""
    angles = t[:, None].float() * torch.exp(-torch.arange(16, device=t.device) / 3)
    first = self.enter(x) + self.time(torch.cat([angles.sin(), angles.cos()], 1).to(x.dtype))[:, :, None, None]
    low = self.norm(self.down(first).relu())
    q, k, v = self.qkv(low.flatten(2).transpose(1, 2).contiguous()).chunk(3, -1)
    mixed = self.out(F.scaled_dot_product_attention(q, k, v)).transpose(1, 2).unflatten(2, low.shape[2:])
    return self.leave(torch.cat([first, self.up(low + mixed)], 1))


def two_views(model, batch):
    x = batch["pixels"]
    one, two = (model(x + 0.3 * torch.randn_like(x)) for _ in range(2))
    return F.cross_entropy(one @ two.T / 0.2, torch.arange(len(x), device=x.device))


@model(
    lambda: {
        "body": nn.Sequential(nn.Conv2d(3, 16, 4, 4), nn.ReLU(), nn.Flatten(), nn.Linear(256, 128), nn.ReLU()),
        "project": nn.Sequential(nn.Linear(128, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 64)),
    },
    batch=lambda step: pictures(32),
    loss=two_views,
)
def two_views_of_a_picture(self, x):
    """A model that is called twice in one step (SimCLR), with augmentation drawn in the loss."""
    return F.normalize(self.project(self.body(x)).float(), dim=-1)
