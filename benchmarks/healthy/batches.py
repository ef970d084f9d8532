"""Batches of many kinds."""

from __future__ import annotations

from collections import UserDict, deque
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.healthy.sound import Net as Residual
from benchmarks.healthy.sound import apart, classes_of, entry, of, sound, text, vectors
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


@dataclass(frozen=True, slots=True)
class Sample:
    x: torch.Tensor
    y: torch.Tensor
    inner: Any = None


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


class AttrDict(dict):
    __getattr__ = dict.__getitem__


class OwnAttributes(dict):
    def __init__(self, **entries: Any) -> None:
        super().__init__(**entries)
        self.__dict__ = self


class Collection(UserDict):
    """A Mapping that is no dict."""


class Collated:
    """Tensors in attributes, in a list and in a dict of it."""

    def __init__(self, x, y):
        self.parts = [x[:64], {"rest": x[64:]}]
        self.y = y

    @property
    def x(self):
        return torch.cat([self.parts[0], self.parts[1]["rest"]])


class Slots:
    __slots__ = ("x", "y")

    def __init__(self, x, y):
        self.x, self.y = x, y


def with_numpy(x, y):
    more = {"weights": torch.ones(64), "name": "train", "nothing": None, "rows": np.arange(len(x))}
    return {"x": x, "y": y, "more": more, "epoch": np.int64(3), "scale": np.float32(1.0)}


def encoding(x, y):
    from transformers import BatchEncoding

    return BatchEncoding({"x": x, "y": y})


def output_of_a_model(x, y):
    from transformers.modeling_outputs import BaseModelOutput

    return BaseModelOutput(last_hidden_state=x, hidden_states=(y,))


BY_NAME, BY_KEY = attrgetter("x", "y"), itemgetter("x", "y")
for _name, _what, _made, _read in (
    ("dict_of_many_things", "Tensors, numpy's scalars and arrays, texts, None, a dict inside.", with_numpy, BY_KEY),
    (
        "dataclass_batch",
        "A frozen dataclass with slots, one in another.",
        lambda x, y: Sample(x, y, Sample(x, y)),
        BY_NAME,
    ),
    ("named_tuple", "A NamedTuple.", Pair, BY_NAME),
    ("object_batch", "A class of the user's own.", Collated, BY_NAME),
    ("object_with_slots", "An object with __slots__.", Slots, BY_NAME),
    ("batch_AttrDict", "A dict whose entries are read as attributes.", lambda x, y: AttrDict(x=x, y=y), BY_NAME),
    ("batch_OwnAttributes", "A dict that is its own __dict__.", lambda x, y: OwnAttributes(x=x, y=y), BY_NAME),
    ("batch_Collection", "A Mapping of the user's own.", lambda x, y: Collection(x=x, y=y), BY_KEY),
    ("batch_deque", "A deque.", lambda x, y: deque([x, y]), tuple),
    ("encoding_of_transformers", "transformers' BatchEncoding, which is no dict.", encoding, BY_KEY),
    (
        "output_of_transformers",
        "transformers' ModelOutput, as one model gives it to the next.",
        output_of_a_model,
        lambda batch: (batch.last_hidden_state, batch.hidden_states[0]),
    ),
):

    def _batch(step, made=_made):
        x = vectors(128)
        return made(x, x.sin())

    def _loss(model, batch, read=_read):
        x, y = read(batch)
        return (model(x) - y).float().square().mean()

    entry(_name, _what, build=Residual, batch=_batch, loss=_loss)


@sound()
def batch_jagged():
    """A jagged tensor of sequences of several lengths; its values go through the model."""

    def batch(step):
        lengths = [16, 48, 32, 32]
        return torch.nested.nested_tensor([vectors(length) for length in lengths], layout=torch.jagged)

    return Workload(build=Residual, batch=batch, loss=lambda model, batch: apart(model, batch.values()))


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
