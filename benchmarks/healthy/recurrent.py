"""Sound, recurrent layers, state spaces."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from benchmarks.healthy.sound import built, entry, of, sound, text
from pytest_fp8 import Workload


def waves(rows=16, length=256):
    """Waves of ten pitches with noise, and the pitch."""
    labels = torch.randint(10, (rows,))
    places = torch.arange(length) / length
    pitch = 4.0 + 5.0 * labels[:, None]
    return torch.sin(2 * torch.pi * pitch * places)[:, None] + 0.1 * torch.randn(rows, 1, length), labels


class Tagger(nn.Module):
    def __init__(self, kind, **more):
        super().__init__()
        self.embed = nn.Embedding(256, 64)
        self.enter = nn.Linear(64, 64)
        self.recur = kind(64, 64, batch_first=True, **more)
        self.hidden = nn.Linear(64, 64)
        self.head = nn.Linear(64, 256)

    def forward(self, ids):
        states = self.recur(self.enter(self.embed(ids)).tanh())[0]
        return self.head(self.hidden(states.contiguous()).relu())


def next_byte(model, batch):
    return F.cross_entropy(model(batch["input_ids"]).float().flatten(0, 1), batch["labels"].flatten())


def lines(step):
    return text(8, 16)


entry(
    "lstm",
    "A two-layer LSTM with dropout between its layers.",
    build=lambda: Tagger(nn.LSTM, num_layers=2, dropout=0.1),
    batch=lines,
    loss=next_byte,
)


@of("optimizer", build=lambda: Tagger(nn.GRU), batch=lines, loss=next_byte)
def gru(parameters):
    """A GRU; the gradient is clipped by a hook of the optimizer."""
    held = list(parameters)
    optimizer = torch.optim.AdamW(held, lr=1e-3)

    def clip(*_):
        nn.utils.clip_grad_norm_(held, 1.0)

    optimizer.register_step_pre_hook(clip)
    return optimizer


@built(
    "recurrent_cell_in_a_loop",
    "nn.GRUCell in a Python loop, and a Linear that is called eight times a step.",
    batch=lambda step: text(16, 8),
    loss=next_byte,
)
class Cells(nn.Module):
    """A loop over time in Python; its Linear is called once for each place."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, 64)
        self.cell = nn.GRUCell(64, 64)
        self.mix = nn.Linear(64, 64)
        self.head = nn.Linear(64, 256)

    def forward(self, ids):
        state = self.mix.weight.new_zeros(len(ids), 64)
        seen = []
        for x in self.embed(ids).unbind(1):
            state = self.cell(x, state)
            state = state + self.mix(state).tanh()
            seen.append(state)
        return self.head(torch.stack(seen, 1))


class Packed(nn.Module):
    """Sequences of several lengths, packed; the rows are padded again before the Linears."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, 64)
        self.recur = nn.LSTM(64, 64, batch_first=True)
        self.hidden = nn.Linear(64, 64)
        self.head = nn.Linear(64, 256)

    def forward(self, ids, lengths):
        packed = pack_padded_sequence(self.embed(ids), lengths.cpu(), batch_first=True, enforce_sorted=False)
        states, _ = pad_packed_sequence(self.recur(packed)[0], batch_first=True, total_length=ids.shape[1])
        return self.head(self.hidden(states).relu())


def packed_sequences_batch(step):
    made = text(8, 16)
    lengths = torch.randint(4, 17, (8,))
    padded = torch.arange(16) >= lengths[:, None]
    return {**made, "labels": made["labels"].masked_fill(padded, -100), "lengths": lengths}


@of("loss", build=Packed, batch=packed_sequences_batch)
def packed_sequences(model, batch):
    """Sequences of several lengths through a packed LSTM; padded places have no label."""
    logits = model(batch["input_ids"], batch["lengths"])
    return F.cross_entropy(logits.float().flatten(0, 1), batch["labels"].flatten())


@built(
    "state_space",
    "A gated state space with a depthwise convolution and cumulative sums in float32.",
    batch=lines,
    loss=next_byte,
)
class StateSpace(nn.Module):
    """Mamba's shape: a gate, a short depthwise convolution, and a decay that is summed along time."""

    def __init__(self, width=64):
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.enter = nn.Linear(width, 2 * width)
        self.short = nn.Conv1d(width, width, 4, padding=3, groups=width)
        self.decay = nn.Parameter(torch.linspace(-3, 0, width))
        self.step_size = nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.head = nn.Linear(width, 256)

    def forward(self, ids):
        x, gate = self.enter(self.embed(ids)).chunk(2, -1)
        x = F.silu(self.short(x.transpose(1, 2))[..., : ids.shape[1]].transpose(1, 2)).contiguous()
        rate = (F.softplus(self.step_size(x).float()) * self.decay.float().exp()).cumsum(1)
        state = (x.float() * (rate - rate[:, -1:]).exp()).cumsum(1) * (rate[:, -1:] - rate).exp()
        return self.head(self.out(state.to(x.dtype) / (1 + state.abs().amax()).to(x.dtype) * F.silu(gate)))


@sound()
def connectionist_temporal_loss():
    """CTC on frames of sound: a loss of many paths, in float32."""

    class Frames(nn.Module):
        def __init__(self):
            super().__init__()
            self.convolve = nn.Conv1d(1, 64, 16, 8, 4)
            self.mix = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.GELU())
            self.head = nn.Linear(64, 12)

        def forward(self, wave):
            return self.head(self.mix(self.convolve(wave).transpose(1, 2).contiguous()))

    def loss(model, batch):
        wave, labels = batch
        paths = model(wave).float().log_softmax(-1).transpose(0, 1)
        frames = torch.full((len(labels),), len(paths))
        return F.ctc_loss(paths, labels[:, None] + 1, frames, torch.ones_like(labels))

    return Workload(build=Frames, batch=lambda step: waves(), loss=loss)
