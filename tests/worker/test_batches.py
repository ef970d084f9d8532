"""Tensors in batches of any class: found, named, placed, and padded to a size that FP8 takes, which keeps the loss."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from pytest_fp8 import pad_to_multiple
from pytest_fp8.zoo import data, models, training
from pytest_fp8.zoo.batch import tensors_of, with_tensors

pytestmark = pytest.mark.slow


class Tokens(NamedTuple):
    input_ids: Any
    labels: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    input_ids: Any
    labels: Any


class Plain:
    def __init__(self, input_ids, labels):
        self.input_ids, self.labels = input_ids, labels


class Easy(dict):
    """Each entry is an attribute as well, as in EasyDict."""

    def __init__(self, input_ids, labels):
        self.input_ids, self.labels = input_ids, labels

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        super().__setitem__(name, value)

    __setitem__ = __setattr__


@pytest.mark.parametrize("kind", [dict, OrderedDict, UserDict, SimpleNamespace, Tokens, Frozen, Plain, Easy])
def test_any_of_them_is_padded_as_a_copy_of_its_class(kind):
    tokens = torch.ones(1, 3, dtype=torch.long)
    given = kind(input_ids=tokens, labels=tokens)
    padded = pad_to_multiple(given, 4)
    assert type(padded) is kind
    assert [part.tolist() for _, part in tensors_of(padded)] == [[[1, 1, 1, 0]], [[1, 1, 1, -100]]]
    assert [part.shape for _, part in tensors_of(given)] == [(1, 3)] * 2, "the user's own batch stays as it is"


def test_what_holds_no_tensor_and_what_holds_itself_stay_themselves():
    model, own = torch.nn.Linear(2, 2), Plain("text", None)
    around = Plain(torch.ones(1), {"inner": [Plain(torch.zeros(3), "text"), 7]})
    around.itself = around
    made = with_tensors({"model": model, "own": own, "around": around}, lambda tensor: tensor + 1)
    assert made["model"] is model
    assert made["own"] is own
    assert made["around"].input_ids.tolist() == [2]
    inner, seven = made["around"].labels["inner"]
    assert (inner.input_ids.tolist(), inner.labels, seven) == ([1, 1, 1], "text", 7)
    assert [name for name, _ in tensors_of(around)] == ["input_ids", "labels.inner.0.input_ids"]


# -- padding ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "seq", "wanted"), [(3, 21, 32), (16, 21, 21), (1, 1, 16)])
def test_the_sequence_is_padded_to_the_next_multiple(rows, seq, wanted):
    batch = {
        "input_ids": torch.ones(rows, seq, dtype=torch.long),
        "labels": torch.ones(rows, seq, dtype=torch.long),
        "attention_mask": torch.ones(rows, seq, dtype=torch.bool),
        "inputs_embeds": torch.ones(rows, seq, 8),
        "weights": torch.ones(rows),
        "name": "one",
    }
    padded = pad_to_multiple(batch, pad_id=7)
    assert padded["input_ids"].shape == (rows, wanted)
    assert padded["inputs_embeds"].shape == (rows, wanted, 8)
    assert padded["weights"].shape == (rows,)
    assert (padded["input_ids"][:, seq:] == 7).all()
    assert (padded["labels"][:, seq:] == -100).all()
    assert not padded["attention_mask"][:, seq:].any()
    assert batch["input_ids"].shape == (rows, seq), "the batch itself stays as it was"


def test_loss_and_gradients_of_a_language_model_do_not_change():
    model = models.build("micro", seed=0, device="cpu").float()
    batch = data.text_batch(3, 21, 0, 0)

    def of(rows):
        model.zero_grad()
        loss = training.cross_entropy(model(input_ids=rows["input_ids"]).logits, rows["labels"])
        loss.backward()
        return loss, torch.cat([p.grad.flatten() for p in model.parameters()])

    loss, gradients = of(batch)
    padded_loss, padded_gradients = of(pad_to_multiple(batch))
    torch.testing.assert_close(padded_loss, loss)
    torch.testing.assert_close(padded_gradients, gradients, rtol=1e-4, atol=1e-6)


def test_rows_of_a_tensor_are_padded_with_zeros_also_where_there_are_none():
    assert pad_to_multiple(torch.ones(13, 4)).shape == (16, 4)
    assert pad_to_multiple(torch.ones(13, 4)).sum() == 52
    assert pad_to_multiple(torch.ones(0, 4)).shape == (16, 4)
    assert pad_to_multiple(torch.ones(32, 4), 32).shape == (32, 4)


def test_a_batch_without_a_sequence_is_an_error_that_lists_its_entries():
    with pytest.raises(ValueError, match=r"pixel_values \(4, 3, 8, 8\)"):
        pad_to_multiple({"pixel_values": torch.ones(4, 3, 8, 8)})
    with pytest.raises(ValueError, match=r"this list has 0 \(4,\)"):
        pad_to_multiple([torch.ones(4)])
