"""Batches of many kinds."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.healthy.sound import apart, classes_of, model, next_byte, of, text, vectors
from pytest_fp8 import pad_to_multiple


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
