"""Attention, written in the ways in which people write it."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.healthy.sound import entry, of, sound, text, vectors
from pytest_fp8 import Workload

WIDTH, HEADS = 64, 4


def next_byte(model, batch):
    return F.cross_entropy(model(batch["input_ids"]).float().flatten(0, 1), batch["labels"].flatten())


def lines(step):
    return text(8, 16)


class Language(nn.Module):
    """An embedding, blocks, a head."""

    def __init__(self, *blocks, tied=False):
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        nn.init.normal_(self.embed.weight, std=0.1)
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def language(name, what, blocks, batch=lines, tied=False):
    """Enter a model of these blocks that guesses the next byte."""
    entry(name, what, build=lambda: Language(*blocks(), tied=tied), batch=batch, loss=next_byte)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class TorchsAttention(nn.Module):
    """nn.MultiheadAttention: it multiplies with its output layer's weight and never calls that layer."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x):
        y = self.norm(x)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device, dtype=x.dtype)
        return x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]


language(
    "multihead_attention",
    "nn.MultiheadAttention, which uses its output layer's weight past the layer.",
    lambda: [TorchsAttention(), Mlp()],
)


@sound()
def transformer_encoder():
    """nn.TransformerEncoder with dropout."""

    class Encoded(nn.Module):
        def __init__(self):
            super().__init__()
            self.enter = nn.Linear(WIDTH, WIDTH)
            layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 128, dropout=0.1, batch_first=True, norm_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

        def forward(self, x):
            return self.encoder(self.enter(x))

    def loss(model, x):
        return (model(x) - x.cumsum(1).sin()).float().square().mean()

    return Workload(build=Encoded, batch=lambda step: vectors(8 * 16).unflatten(0, (8, 16)), loss=loss)


@sound()
def encoder_decoder():
    """nn.Transformer: two inputs of two lengths, cross attention."""

    class Translator(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(256, WIDTH)
            self.body = nn.Transformer(WIDTH, HEADS, 1, 1, 128, dropout=0.0, batch_first=True)
            self.head = nn.Linear(WIDTH, 256)

        def forward(self, source, target):
            mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=self.embed.weight.dtype)
            return self.head(self.body(self.embed(source), self.embed(target), tgt_mask=mask, tgt_is_causal=True))

    def batch(step):
        source = torch.randint(1, 32, (16, 12))
        return {"source": source, "target": source.flip(1)[:, :8]}

    def loss(model, batch):
        given = F.pad(batch["target"][:, :-1], (1, 0))
        return F.cross_entropy(model(batch["source"], given).float().flatten(0, 1), batch["target"].flatten())

    return Workload(build=Translator, batch=batch, loss=loss, learning_rate=4e-3)


def rotated(x, places):
    """Rotary places, by a product with a matrix for each place."""
    half = x.shape[-1] // 2
    angles = places[:, None] / 100 ** (torch.arange(half, device=x.device) / half)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    one, two = x.chunk(2, -1)
    return torch.cat([one * cos - two * sin, two * cos + one * sin], -1)


class Grouped(nn.Module):
    """Four query heads share two key heads; scores and values are plain matrix products."""

    def __init__(self, recomputed=False):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.q, self.kv = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.recomputed = recomputed

    def forward(self, x):
        return checkpoint(self.mixed, x, use_reentrant=False) if self.recomputed and self.training else self.mixed(x)

    def mixed(self, x):
        y = self.norm(x)
        places = torch.arange(x.shape[1], device=x.device)
        q = rotated(self.q(y).unflatten(-1, (HEADS, -1)).transpose(1, 2), places)
        k, v = self.kv(y).unflatten(-1, (2, HEADS // 2, -1)).permute(2, 0, 3, 1, 4)
        k, v = (part.repeat_interleave(2, 1) for part in (rotated(k, places), v))
        scores = torch.matmul(q, k.transpose(-1, -2)).float() / math.sqrt(q.shape[-1])
        scores = scores + torch.full_like(scores, float("-inf")).triu(1)
        return x + self.out(torch.matmul(scores.softmax(-1).to(v.dtype), v).transpose(1, 2).flatten(2))


language(
    "grouped_queries_with_rotary",
    "Grouped queries, rotary places, attention as two plain matrix products.",
    lambda: [Grouped(), Mlp()],
)
language(
    "recomputed_blocks",
    "The model recomputes its attention in the backward pass.",
    lambda: [Grouped(True), Mlp(), Grouped(True)],
)
language("tied_embeddings", "The output projection is the embedding.", lambda: [Grouped(), Mlp()], tied=True)


language(
    "one_block_called_three_times",
    "ALBERT's way: the same block, three times in a row.",
    lambda: 3 * [Grouped(), Mlp()],
)


class Latents(nn.Module):
    """Perceiver: sixteen learnt rows look at the input."""

    def __init__(self):
        super().__init__()
        self.latents = nn.Parameter(0.1 * torch.randn(16, WIDTH))
        self.q, self.kv, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = Mlp()

    def forward(self, x):
        q = self.q(self.latents).expand(len(x), -1, -1)
        k, v = self.kv(x).chunk(2, -1)
        return self.mlp(self.out(F.scaled_dot_product_attention(q, k, v))).mean(1)


@of("loss", build=Latents, batch=lambda step: vectors(16 * 9).unflatten(0, (16, 9)))
def learnt_latents(model, x):
    """A raw parameter goes through Linears; the batch has an odd number of rows in each sequence."""
    return (model(x) - x.amax(1)).float().square().mean()


class RawQueries(nn.Module):
    """Raw parameters are multiplied at exactly the size of the Linears beside them."""

    def __init__(self):
        super().__init__()
        self.q, self.k = (nn.Parameter(0.1 * torch.randn(WIDTH, WIDTH)) for _ in range(2))
        self.v, self.out = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        mixed = F.scaled_dot_product_attention(x @ self.q, F.linear(x, self.k), self.v(x), is_causal=True)
        return x + self.out(mixed)


language(
    "raw_parameters_of_a_linears_size",
    "Raw parameters, multiplied by @ and F.linear at the size of the Linears beside them.",
    lambda: [RawQueries(), Mlp()],
)
