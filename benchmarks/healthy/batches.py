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

from benchmarks.healthy.sound import apart, classes_of, entry, mlp, model, module, next_byte, of, text, vectors
from pytest_fp8 import pad_to_multiple

RATE = 4e-3
"""At which these learn something within ten steps of fresh data."""


@module(lambda outputs=16: {"blocks": nn.ModuleList([mlp(), mlp()]), "head": nn.Linear(64, outputs)})
def Net(self, x):
    """Two residual blocks and a head; gives logits for each row."""
    for block in self.blocks:
        x = x + block(x)
    return self.head(x).float()


@dataclass(frozen=True, slots=True)
class Sample:
    x: torch.Tensor
    y: torch.Tensor
    inner: Any = None

    @classmethod
    def nested(cls, x, y):
        return cls(x, y, cls(x, y))


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
    ("dataclass_batch", "A frozen dataclass with slots, one in another.", Sample.nested, BY_NAME),
    ("named_tuple", "A NamedTuple.", Pair, BY_NAME),
    ("object_batch", "A class of the user's own.", Collated, BY_NAME),
    ("object_with_slots", "An object with __slots__.", Slots, BY_NAME),
    ("batch_AttrDict", "A dict whose entries are read as attributes.", lambda x, y: AttrDict(x=x, y=y), BY_NAME),
    ("batch_OwnAttributes", "A dict that is its own __dict__.", lambda x, y: OwnAttributes(x=x, y=y), BY_NAME),
    ("batch_Collection", "A Mapping of the user's own.", lambda x, y: Collection(x=x, y=y), BY_KEY),
    ("batch_deque", "A deque.", lambda x, y: deque([x, y]), tuple),
    ("encoding_of_transformers", "transformers' BatchEncoding, which is no dict.", encoding, BY_KEY),
    ("output_of_transformers", "transformers' ModelOutput.", output_of_a_model, lambda batch: (batch[0], batch[1][0])),
):

    def _batch(step, made=_made):
        x = vectors(128)
        return made(x, x.sin())

    def _loss(model, batch, read=_read):
        x, y = read(batch)
        return (model(x) - y).float().square().mean()

    entry(_name, _what, batch=_batch, loss=_loss)


@of("loss", batch=lambda step: torch.nested.nested_tensor([vectors(n) for n in (16, 48, 32, 32)], layout=torch.jagged))
def batch_jagged(model, batch):
    """A jagged tensor of sequences of several lengths; its values go through the model."""
    return apart(model, batch.values())


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


def documents(step):
    made = text(1, 96)
    lengths = torch.tensor([20, 33, 43])
    places = torch.cat([torch.arange(int(length)) for length in lengths])
    return made["input_ids"][0], places, torch.repeat_interleave(torch.arange(3), lengths), made["labels"][0]


@model(
    lambda: {"embed": nn.Embedding(256, 64), "places": nn.Embedding(64, 64), "net": Net(256)},
    batch=documents,
    loss=lambda model, batch: F.cross_entropy(model(*batch[:-1]), batch[-1]),
)
def packed_documents(self, ids, places, document):
    """Documents behind one another in one row, told apart by their places."""
    x = self.embed(ids) + self.places(places)
    same = document[:, None] == document[None]
    causal = torch.ones_like(same).tril() & same
    return self.net(x + F.scaled_dot_product_attention(x[None], x[None], x[None], attn_mask=causal)[0])


@of("batch", build=Net, loss=lambda model, pair: F.cross_entropy(model(pair[0]), pair[1]), learning_rate=RATE)
def batches_of_several_sizes(step):
    """The number of rows changes from step to step, always a multiple of 16."""
    x = vectors(16 * (2 + step % 3))
    return x, classes_of(x, 16)


def means(model, parts):
    wanted = torch.stack([part.mean(0) for part in parts])
    return (model(parts) - wanted).float().square().mean()


@model(
    lambda: {"net": Net(64), "read": nn.Linear(64, 64)},
    batch=lambda step: [vectors(int(length)) for length in torch.randint(3, 12, (64,))],
    loss=means,
    learning_rate=RATE,
)
def jagged_lists(self, parts):
    """A list of graphs or sets of several sizes; their rows are joined, padded and pooled by index."""
    owner = torch.repeat_interleave(torch.arange(len(parts)), torch.tensor([len(part) for part in parts]))
    rows = torch.cat(parts)
    seen = self.net(pad_to_multiple(rows))[: len(rows)]
    pooled = seen.new_zeros(len(parts), 64).index_add(0, owner, seen)
    return self.read((pooled / 8).to(rows.dtype))


def edges_and_nodes(step):
    edges = torch.sparse_coo_tensor(torch.randint(0, 128, (2, 400)), torch.ones(400), (128, 128)).coalesce()
    return edges, vectors(128)


@model(
    lambda: {"net": Net(64)},
    batch=edges_and_nodes,
    loss=lambda model, given: apart(lambda x: model(given[0], x), given[1]),
    learning_rate=RATE,
)
def sparse_graph(self, edges, x):
    """A graph's edges as a sparse tensor, and its nodes."""
    return self.net(x + 0.1 * (edges.float() @ x.float()).to(x.dtype))
