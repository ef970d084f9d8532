"""Pictures: convolutions, patches, autoencoders, diffusion."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.healthy.sound import built, entry, pictures


def classify(model, batch):
    return F.cross_entropy(model(batch["pixels"]).float(), batch["labels"])


def pictures_of_sixteen(step):
    return pictures(16, 16)


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.one = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.two = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)])

    def forward(self, x):
        y = self.norms[0](self.one(x)).relu()
        return (x + self.norms[1](self.two(y))).relu()


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = nn.Sequential(Residual(16), nn.MaxPool2d(2), Residual(16))
        self.hidden = nn.Linear(16 * 8 * 8, 128)
        self.head = nn.Linear(128, 10)

    def forward(self, x):
        return self.head(self.hidden(self.blocks(self.stem(x)).flatten(1)).relu())


entry(
    "convolution_net",
    "A residual convolution net with BatchNorm; two Linears at its end.",
    build=ConvNet,
    batch=lambda step: pictures(64),
    loss=classify,
    learning_rate=2e-4,
)


class Vit(nn.Module):
    """Patches by a strided convolution, a class token, learnt places."""

    def __init__(self, width=64):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(0.02 * torch.randn(1, 17, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(4))
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(2)
        )
        self.classifier = nn.Linear(width, 10)

    def forward(self, pixels):
        x = self.patches(pixels).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.places
        for i in range(2):
            q, k, v = self.qkv[i](self.norms[2 * i](x)).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
            x = x + self.out[i](F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
            x = x + self.mlp[i](self.norms[2 * i + 1](x))
        return self.classifier(x[:, 0])


entry(
    "vision_transformer",
    "A vision transformer with a convolution for its patches, a class token, an odd number of places.",
    build=Vit,
    batch=pictures_of_sixteen,
    loss=classify,
)


@built(
    "mlp_mixer",
    "Linears along places and along channels in turn; 16 places are the smallest size that FP8 takes.",
    batch=pictures_of_sixteen,
    loss=classify,
)
class Mixer(nn.Module):
    """Linears along places and along channels in turn."""

    def __init__(self, places=16, width=64):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.across = nn.Sequential(nn.Linear(places, 64), nn.GELU(), nn.Linear(64, places))
        self.along = nn.Sequential(nn.Linear(width, 128), nn.GELU(), nn.Linear(128, width))
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.head = nn.Linear(width, 10)

    def forward(self, pixels):
        x = self.patches(pixels).flatten(2).transpose(1, 2)
        x = x + self.across(self.norms[0](x).transpose(1, 2).contiguous()).transpose(1, 2)
        x = x + self.along(self.norms[1](x))
        return self.head(x.mean(1))


@built(
    "convnext",
    "Depthwise convolutions beside Linears whose input has four dimensions.",
    batch=pictures_of_sixteen,
    loss=classify,
)
class ConvNext(nn.Module):
    """Depthwise convolutions, Linears over the last of four dimensions, a scale per channel."""

    def __init__(self, width=32):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 2, stride=2)
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(0.1 * torch.ones(width))
        self.head = nn.Linear(8 * width, 10)

    def forward(self, x):
        x = self.stem(x)
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        x = x + (self.scale * self.down(F.gelu(self.up(y)))).permute(0, 3, 1, 2)
        return self.head(x.mean(3).flatten(1))


class Vae(nn.Module):
    """Draws its latents inside the forward pass."""

    def __init__(self):
        super().__init__()
        self.encode = nn.Sequential(nn.Conv2d(3, 16, 4, 2, 1), nn.SiLU(), nn.Flatten(), nn.Linear(1024, 128), nn.SiLU())
        self.mean, self.spread = nn.Linear(128, 16), nn.Linear(128, 16)
        self.decode = nn.Sequential(nn.Linear(16, 1024), nn.SiLU(), nn.Unflatten(1, (16, 8, 8)))
        self.pixels = nn.ConvTranspose2d(16, 3, 4, 2, 1)

    def forward(self, x):
        hidden = self.encode(x)
        mean, spread = self.mean(hidden), self.spread(hidden)
        drawn = mean + torch.randn_like(mean) * (0.5 * spread).exp()
        return self.pixels(self.decode(drawn)), mean, spread


def evidence_lower_bound(model, batch):
    """Summed over pixels and averaged over pictures, as papers do: some hundreds."""
    made, mean, spread = (part.float() for part in model(batch["pixels"]))
    apart = (made - batch["pixels"].float()).square().flatten(1).sum(1)
    divergence = -0.5 * (1 + spread - mean.square() - spread.exp()).sum(1)
    return (apart + divergence).mean()


entry(
    "variational_autoencoder",
    "A loss of several hundreds (a sum over pixels), transposed convolutions, noise drawn in the forward pass.",
    build=Vae,
    batch=pictures_of_sixteen,
    loss=evidence_lower_bound,
    learning_rate=3e-3,
)


class Denoiser(nn.Module):
    """A small U-net that is told the time by sines through two Linears."""

    def __init__(self):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 32))
        self.enter = nn.Conv2d(3, 32, 3, padding=1)
        self.down, self.up = nn.Conv2d(32, 32, 4, 2, 1), nn.ConvTranspose2d(32, 32, 4, 2, 1)
        self.norm = nn.GroupNorm(4, 32)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.leave = nn.Conv2d(64, 3, 3, padding=1)

    def forward(self, x, t):
        rates = torch.exp(-torch.arange(16, device=t.device) / 3)
        angles = t[:, None].float() * rates
        told = self.time(torch.cat([angles.sin(), angles.cos()], 1).to(x.dtype))
        first = self.enter(x) + told[:, :, None, None]
        low = self.norm(self.down(first).relu())
        q, k, v = self.qkv(low.flatten(2).transpose(1, 2).contiguous()).chunk(3, -1)
        mixed = self.out(F.scaled_dot_product_attention(q, k, v)).transpose(1, 2).unflatten(2, low.shape[2:])
        return self.leave(torch.cat([first, self.up(low + mixed)], 1))


def denoise(model, batch):
    x = batch["pixels"]
    t = torch.randint(1, 1000, (len(x),), device=x.device)
    noise = torch.randn_like(x)
    keep = torch.cos(t / 1000 * torch.pi / 2).to(x.dtype)[:, None, None, None]
    return F.mse_loss(model(keep * x + (1 - keep.square()).sqrt() * noise, t).float(), noise.float())


entry(
    "diffusion",
    "Noise is predicted (a squared error); time and noise are drawn in the loss.",
    build=Denoiser,
    batch=pictures_of_sixteen,
    loss=denoise,
)


class TwoViews(nn.Module):
    """SimCLR: one encoder called twice a step, a projection with BatchNorm."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 16, 4, 4), nn.ReLU(), nn.Flatten(), nn.Linear(256, 128))
        self.project = nn.Sequential(nn.Linear(128, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 64))

    def forward(self, x):
        return F.normalize(self.project(self.body(x).relu()).float(), dim=-1)


def two_views(model, batch):
    x = batch["pixels"]
    one, two = (model(x + 0.3 * torch.randn_like(x)) for _ in range(2))
    return F.cross_entropy(one @ two.T / 0.2, torch.arange(len(x), device=x.device))


entry(
    "two_views_of_a_picture",
    "A model that is called twice in one step, with augmentation drawn in the loss.",
    build=TwoViews,
    batch=lambda step: pictures(32, 16),
    loss=two_views,
)
