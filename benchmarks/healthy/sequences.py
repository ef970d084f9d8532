"""Sequences: attention, recurrent layers and state spaces, written in the ways in which people write them."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from benchmarks.healthy.sound import entry, lines, model, module, next_byte, of, text, toward, vectors

WIDTH, HEADS = 64, 4

# -- attention --------------------------------------------------------------------------------------------------------


class Language(nn.Module):
    """An embedding, blocks, a head."""

    def __init__(self, *blocks, tied=False):
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        nn.init.normal_(self.embed.weight, std=0.1)
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.norm(self.blocks(self.embed(ids))))


def language(name, what, blocks, tied=False):
    """Enter a model of these blocks that guesses the next byte."""
    entry(name, what, build=lambda: Language(*blocks(), tied=tied), batch=lines, loss=next_byte)


@module(
    lambda: {
        "norm": nn.LayerNorm(WIDTH),
        "up": nn.Linear(WIDTH, 2 * WIDTH),
        "down": nn.Linear(2 * WIDTH, WIDTH),
    }
)
def Mlp(self, x):
    return x + self.down(F.gelu(self.up(self.norm(x))))


@module(lambda: {"norm": nn.LayerNorm(WIDTH), "attention": nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)})
def TorchsAttention(self, x):
    y = self.norm(x)
    mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device, dtype=x.dtype)
    return x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]


def rotated(x, places):
    """Rotary places, by a product with a matrix for each place."""
    half = x.shape[-1] // 2
    angles = places[:, None] / 100 ** (torch.arange(half, device=x.device) / half)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    one, two = x.chunk(2, -1)
    return torch.cat([one * cos - two * sin, two * cos + one * sin], -1)


@module(
    lambda: {
        "norm": nn.RMSNorm(WIDTH),
        "q": nn.Linear(WIDTH, WIDTH, bias=False),
        "kv": nn.Linear(WIDTH, WIDTH, bias=False),
        "out": nn.Linear(WIDTH, WIDTH, bias=False),
    }
)
def Grouped(self, x):
    """Four query heads share two key heads; scores and values are plain matrix products."""
    y = self.norm(x)
    places = torch.arange(x.shape[1], device=x.device)
    q = rotated(self.q(y).unflatten(-1, (HEADS, -1)).transpose(1, 2), places)
    k, v = self.kv(y).unflatten(-1, (2, HEADS // 2, -1)).permute(2, 0, 3, 1, 4)
    k, v = (part.repeat_interleave(2, 1) for part in (rotated(k, places), v))
    scores = torch.matmul(q, k.transpose(-1, -2)).float() / math.sqrt(q.shape[-1])
    scores = scores + torch.full_like(scores, float("-inf")).triu(1)
    return x + self.out(torch.matmul(scores.softmax(-1).to(v.dtype), v).transpose(1, 2).flatten(2))


@module(base=Grouped)
def Recomputed(self, x):
    def mixed(x):
        return Grouped.forward(self, x)

    return checkpoint(mixed, x, use_reentrant=False) if self.training else mixed(x)


@module(
    lambda: {
        "q": nn.Parameter(0.1 * torch.randn(WIDTH, WIDTH)),
        "k": nn.Parameter(0.1 * torch.randn(WIDTH, WIDTH)),
        "v": nn.Linear(WIDTH, WIDTH, bias=False),
        "out": nn.Linear(WIDTH, WIDTH, bias=False),
    }
)
def RawQueries(self, x):
    mixed = F.scaled_dot_product_attention(x @ self.q, F.linear(x, self.k), self.v(x), is_causal=True)
    return x + self.out(mixed)


for _name, _what, _blocks in (
    (
        "multihead_attention",
        "nn.MultiheadAttention, which uses its output layer's weight past the layer.",
        lambda: [TorchsAttention(), Mlp()],
    ),
    (
        "grouped_queries_with_rotary",
        "Grouped queries, rotary places, attention as two plain matrix products.",
        lambda: [Grouped(), Mlp()],
    ),
    (
        "recomputed_blocks",
        "The model recomputes its attention in the backward pass.",
        lambda: [Recomputed(), Mlp(), Recomputed()],
    ),
    (
        "one_block_called_three_times",
        "ALBERT's way: the same block, three times in a row.",
        lambda: 3 * [Grouped(), Mlp()],
    ),
    (
        "raw_parameters_of_a_linears_size",
        "Raw parameters, multiplied by @ and F.linear at the size of the Linears beside them.",
        lambda: [RawQueries(), Mlp()],
    ),
):
    language(_name, _what, _blocks)
language("tied_embeddings", "The output projection is the embedding.", lambda: [Grouped(), Mlp()], tied=True)


def transformer_encoder_build():
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 128, dropout=0.1, batch_first=True, norm_first=True)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))


entry(
    "transformer_encoder",
    "nn.TransformerEncoder with dropout.",
    build=transformer_encoder_build,
    batch=lambda step: vectors(8 * 16).unflatten(0, (8, 16)),
    loss=toward(lambda x: x.cumsum(1).sin()),
)


def translation(step):
    source = torch.randint(1, 32, (16, 12))
    return {"source": source, "target": source.flip(1)[:, :8]}


def next_word(model, batch):
    given = F.pad(batch["target"][:, :-1], (1, 0))
    return F.cross_entropy(model(batch["source"], given).float().flatten(0, 1), batch["target"].flatten())


@model(
    lambda: {
        "embed": nn.Embedding(256, WIDTH),
        "body": nn.Transformer(WIDTH, HEADS, 1, 1, 128, dropout=0.0, batch_first=True),
        "head": nn.Linear(WIDTH, 256),
    },
    batch=translation,
    loss=next_word,
    learning_rate=4e-3,
)
def encoder_decoder(self, source, target):
    """nn.Transformer: two inputs of two lengths, cross attention."""
    mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=self.embed.weight.dtype)
    return self.head(self.body(self.embed(source), self.embed(target), tgt_mask=mask, tgt_is_causal=True))


@model(
    lambda: {
        "latents": nn.Parameter(0.1 * torch.randn(16, WIDTH)),
        "q": nn.Linear(WIDTH, WIDTH),
        "kv": nn.Linear(WIDTH, 2 * WIDTH),
        "out": nn.Linear(WIDTH, WIDTH),
        "mlp": Mlp(),
    },
    batch=lambda step: vectors(16 * 9).unflatten(0, (16, 9)),
    loss=toward(lambda x: x.amax(1)),
)
def learnt_latents(self, x):
    """Perceiver: a raw parameter goes through Linears; the batch has an odd number of rows in each sequence."""
    q = self.q(self.latents).expand(len(x), -1, -1)
    k, v = self.kv(x).chunk(2, -1)
    return self.mlp(self.out(F.scaled_dot_product_attention(q, k, v))).mean(1)


# -- recurrent layers -------------------------------------------------------------------------------------------------


@module(
    lambda recur: {
        "embed": nn.Embedding(256, 64),
        "enter": nn.Linear(64, 64),
        "recur": recur,
        "hidden": nn.Linear(64, 64),
        "head": nn.Linear(64, 256),
    }
)
def Tagger(self, ids):
    states = self.recur(self.enter(self.embed(ids)).tanh())[0]
    return self.head(self.hidden(states.contiguous()).relu())


entry(
    "lstm",
    "A two-layer LSTM with dropout between its layers.",
    build=lambda: Tagger(nn.LSTM(64, 64, batch_first=True, num_layers=2, dropout=0.1)),
    batch=lines,
    loss=next_byte,
)


@of("optimizer", build=lambda: Tagger(nn.GRU(64, 64, batch_first=True)), batch=lines, loss=next_byte)
def gru(parameters):
    """A GRU; the gradient is clipped by a hook of the optimizer."""
    held = list(parameters)
    optimizer = torch.optim.AdamW(held, lr=1e-3)

    def clip(*_):
        nn.utils.clip_grad_norm_(held, 1.0)

    optimizer.register_step_pre_hook(clip)
    return optimizer


@model(
    lambda: {
        "embed": nn.Embedding(256, 64),
        "cell": nn.GRUCell(64, 64),
        "mix": nn.Linear(64, 64),
        "head": nn.Linear(64, 256),
    },
    batch=lambda step: text(16, 8),
    loss=next_byte,
)
def recurrent_cell_in_a_loop(self, ids):
    """nn.GRUCell in a Python loop, and a Linear that is called eight times a step."""
    state = self.mix.weight.new_zeros(len(ids), 64)
    seen = []
    for x in self.embed(ids).unbind(1):
        state = self.cell(x, state)
        state = state + self.mix(state).tanh()
        seen.append(state)
    return self.head(torch.stack(seen, 1))


def sequences_of_several_lengths(step):
    made = text(8, 16)
    lengths = torch.randint(4, 17, (8,))
    padded = torch.arange(16) >= lengths[:, None]
    return {**made, "labels": made["labels"].masked_fill(padded, -100), "lengths": lengths}


@model(
    lambda: {
        "embed": nn.Embedding(256, 64),
        "recur": nn.LSTM(64, 64, batch_first=True),
        "hidden": nn.Linear(64, 64),
        "head": nn.Linear(64, 256),
    },
    batch=sequences_of_several_lengths,
    loss=lambda model, batch: next_byte(lambda ids: model(ids, batch["lengths"]), batch),
)
def packed_sequences(self, ids, lengths):
    """Sequences of several lengths through a packed LSTM; padded places have no label."""
    packed = pack_padded_sequence(self.embed(ids), lengths.cpu(), batch_first=True, enforce_sorted=False)
    states, _ = pad_packed_sequence(self.recur(packed)[0], batch_first=True, total_length=ids.shape[1])
    return self.head(self.hidden(states).relu())


@model(
    lambda: {
        "embed": nn.Embedding(256, WIDTH),
        "enter": nn.Linear(WIDTH, 2 * WIDTH),
        "short": nn.Conv1d(WIDTH, WIDTH, 4, padding=3, groups=WIDTH),
        "decay": nn.Parameter(torch.linspace(-3, 0, WIDTH)),
        "step_size": nn.Linear(WIDTH, WIDTH),
        "out": nn.Linear(WIDTH, WIDTH),
        "head": nn.Linear(WIDTH, 256),
    },
    batch=lines,
    loss=next_byte,
)
def state_space(self, ids):
    """Mamba's shape: a gate, a depthwise convolution, and a decay that is summed along time in float32."""
    x, gate = self.enter(self.embed(ids)).chunk(2, -1)
    x = F.silu(self.short(x.transpose(1, 2))[..., : ids.shape[1]].transpose(1, 2)).contiguous()
    rate = (F.softplus(self.step_size(x).float()) * self.decay.float().exp()).cumsum(1)
    state = (x.float() * (rate - rate[:, -1:]).exp()).cumsum(1) * (rate[:, -1:] - rate).exp()
    return self.head(self.out(state.to(x.dtype) / (1 + state.abs().amax()).to(x.dtype) * F.silu(gate)))


def waves(step):
    """Waves of ten pitches with noise, and the pitch."""
    labels = torch.randint(10, (16,))
    places = torch.arange(256) / 256
    pitch = 4.0 + 5.0 * labels[:, None]
    return torch.sin(2 * torch.pi * pitch * places)[:, None] + 0.1 * torch.randn(16, 1, 256), labels


@module(
    lambda: {
        "convolve": nn.Conv1d(1, 64, 16, 8, 4),
        "mix": nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.GELU(), nn.Linear(64, 12)),
    }
)
def Frames(self, wave):
    return self.mix(self.convolve(wave).transpose(1, 2).contiguous())


@of("loss", build=Frames, batch=waves)
def connectionist_temporal_loss(model, batch):
    """CTC on frames of sound: a loss of many paths, in float32."""
    wave, labels = batch
    paths = model(wave).float().log_softmax(-1).transpose(0, 1)
    frames = torch.full((len(labels),), len(paths))
    return F.ctc_loss(paths, labels[:, None] + 1, frames, torch.ones_like(labels))
