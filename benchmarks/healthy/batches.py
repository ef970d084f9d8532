"""Batches of many kinds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.healthy.sound import classes_of, of, sound, text, vectors
from pytest_fp8 import Workload, pad_to_multiple

RATE = 4e-3
"""At which these learn something within ten steps of fresh data."""


class Net(nn.Module):
    """Two residual blocks and a head; gives logits for each row."""

    def __init__(self, outputs=16):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(2))
        self.head = nn.Linear(64, outputs)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).float()


def labelled(count=64):
    x = vectors(count)
    return x, classes_of(x, 16)


class WithLoss(nn.Module):
    """Gives a tuple (loss, logits), as many research models do."""

    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, x, labels=None, weights=None):
        logits = self.net(x)
        each = F.cross_entropy(logits, labels, reduction="none")
        return (each if weights is None else each * weights).mean(), logits


def dict_of_many_things_batch(step):
    x, labels = labelled()
    more = {"weights": torch.ones(64), "name": "train", "nothing": None}
    return {"x": x, "labels": labels, "more": more, "epoch": step // 10}


@of("loss", build=WithLoss, batch=dict_of_many_things_batch, learning_rate=RATE)
def dict_of_many_things(model, batch):
    """A dict with tensors, numbers, texts, None and a dict inside."""
    return model(batch["x"], batch["labels"], batch["more"]["weights"])[0]


@of("batch", build=WithLoss, loss=lambda model, batch: model(*batch)[0], learning_rate=RATE)
def tuple_of_a_loader(step):
    """A tuple (inputs, labels), as a TensorDataset gives it."""
    return labelled()


class Pair(NamedTuple):
    x: torch.Tensor
    labels: torch.Tensor


@of("batch", build=Net, loss=lambda model, pair: F.cross_entropy(model(pair.x), pair.labels), learning_rate=RATE)
def named_tuple(step):
    """A NamedTuple."""
    return Pair(*labelled())


@dataclass(frozen=True)
class Sample:
    """A frozen dataclass with a nested one."""

    x: torch.Tensor
    labels: torch.Tensor
    inner: Any = None
    source: str = "train"
    sizes: list[int] = field(default_factory=list)


def dataclass_batch_batch(step):
    x, labels = labelled()
    return Sample(x, labels, inner=Sample(x.sin(), labels), sizes=[64])


@of("loss", build=Net, batch=dataclass_batch_batch, learning_rate=RATE)
def dataclass_batch(model, sample):
    """A frozen dataclass with tensors, and another one inside."""
    return F.cross_entropy(model(sample.x + sample.inner.x), sample.labels)


class Collated:
    """A class of the user's own with tensors in its attributes."""

    def __init__(self, x, labels):
        self.x, self.labels = x, labels
        self.parts = [x[:32].abs(), {"rest": x[32:].abs()}]

    def __len__(self):
        return len(self.x)


def object_batch_batch(step):
    return Collated(*labelled())


@of("loss", build=Net, batch=object_batch_batch, learning_rate=RATE)
def object_batch(model, batch):
    """A class of the user's own; tensors in attributes, in a list and in a dict of it."""
    both = torch.cat([batch.parts[0], batch.parts[1]["rest"]])
    return F.cross_entropy(model(batch.x + 0.1 * both), batch.labels)


@of("batch", build=WithLoss, loss=lambda model, batch: model(**batch)[0], learning_rate=RATE)
def encoding_of_transformers(step):
    """transformers' BatchEncoding, which is no dict."""
    from transformers import BatchEncoding

    return BatchEncoding(dict(zip(("x", "labels"), labelled(), strict=True)))


class Attending(nn.Module):
    """A bidirectional encoder with a mask."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, 64)
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)
        self.head = nn.Linear(64, 256)

    def forward(self, input_ids, attention_mask):
        x = self.embed(input_ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        allowed = attention_mask[:, None, :].bool()
        return self.head(x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=allowed))).float()


def padded_sequences_batch(step):
    made = text(6, 13)
    short = torch.arange(13) >= torch.randint(5, 14, (6, 1))
    made["labels"] = made["labels"].masked_fill(short, -100)
    return pad_to_multiple({**made, "attention_mask": (~short).long()})


@of("loss", build=Attending, batch=padded_sequences_batch)
def padded_sequences(model, batch):
    """Sequences of several lengths, masked, and padded with pytest_fp8.pad_to_multiple."""
    logits = model(batch["input_ids"], batch["attention_mask"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


@sound()
def packed_documents():
    """Documents behind one another in one row, told apart by their places; 16 tokens each."""

    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.places = nn.Embedding(256, 64), nn.Embedding(64, 64)
            self.net = Net(256)

        def forward(self, ids, places, document):
            x = self.embed(ids) + self.places(places)
            same = document[:, None] == document[None]
            causal = torch.ones_like(same).tril() & same
            return self.net(x + F.scaled_dot_product_attention(x[None], x[None], x[None], attn_mask=causal)[0])

    def batch(step):
        made = text(1, 96)
        lengths = torch.tensor([20, 33, 43])
        document = torch.repeat_interleave(torch.arange(3), lengths)
        places = torch.cat([torch.arange(int(length)) for length in lengths])
        return made["input_ids"][0], places, document, made["labels"][0]

    def loss(model, batch):
        *given, labels = batch
        return F.cross_entropy(model(*given), labels)

    return Workload(build=Packed, batch=batch, loss=loss)


@of("batch", build=Net, loss=lambda model, pair: F.cross_entropy(model(pair[0]), pair[1]), learning_rate=RATE)
def batches_of_several_sizes(step):
    """The number of rows changes from step to step, always a multiple of 16."""
    return labelled(16 * (2 + step % 3))


@sound()
def jagged_lists():
    """A list of graphs or sets of several sizes; their rows are joined, padded and pooled by index."""

    class Sets(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.read = Net(64), nn.Linear(64, 64)

        def forward(self, parts):
            owner = torch.repeat_interleave(torch.arange(len(parts)), torch.tensor([len(part) for part in parts]))
            rows = torch.cat(parts)
            seen = self.net(pad_to_multiple(rows))[: len(rows)]
            pooled = seen.new_zeros(len(parts), 64).index_add(0, owner, seen)
            return self.read((pooled / 8).to(rows.dtype))

    def batch(step):
        return [vectors(int(length)) for length in torch.randint(3, 12, (64,))]

    def loss(model, parts):
        wanted = torch.stack([part.mean(0) for part in parts])
        return (model(parts) - wanted).float().square().mean()

    return Workload(build=Sets, batch=batch, loss=loss, learning_rate=RATE)


@sound()
def sparse_graph():
    """A graph's edges as a sparse tensor, and its nodes."""

    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = Net(64)

        def forward(self, edges, x):
            return self.net(x + 0.1 * (edges.float() @ x.float()).to(x.dtype))

    def batch(step):
        edges = torch.sparse_coo_tensor(torch.randint(0, 128, (2, 400)), torch.ones(400), (128, 128)).coalesce()
        return edges, vectors(128)

    def loss(model, given):
        return (model(*given) - given[1].sin()).float().square().mean()

    return Workload(build=Graph, batch=batch, loss=loss, learning_rate=RATE)
