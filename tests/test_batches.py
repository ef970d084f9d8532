"""Tensors in batches of any class: found, named, placed and told apart."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, defaultdict, deque
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from pytest_fp8 import pad_to_multiple
from pytest_fp8.zoo.batch import tensors_of, with_tensors
from pytest_fp8.zoo.data import fingerprint

pytestmark = pytest.mark.slow


class Tokens(NamedTuple):
    input_ids: Any
    labels: Any


class Named(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any
    y: Any = None


@dataclasses.dataclass(slots=True)
class Slotted:
    x: Any
    y: Any = None


class Plain:
    def __init__(self, x, y=None):
        self.x, self.y = x, y


class ByKey(dict):
    __getattr__ = dict.__getitem__

    def __init__(self, x, y=None):
        super().__init__(x=x, y=y)


class ItsOwnAttributes(dict):
    def __init__(self, x, y=None):
        super().__init__(x=x, y=y)
        self.__dict__ = self


class Easy(dict):
    """Each entry is an attribute as well, as in EasyDict."""

    def __init__(self, x, y=None):
        self.x, self.y = x, y

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        super().__setitem__(name, value)

    __setitem__ = __setattr__


def encoding(x, y=None):
    return UserDict({"x": x, "y": y})


def default(x, y=None):
    return defaultdict(list, x=x, y=y)


def ordered(x, y=None):
    return OrderedDict(x=x, y=y)


KINDS = [Named, Frozen, Slotted, Plain, encoding, ByKey, ItsOwnAttributes, Easy, default, ordered]


@pytest.mark.parametrize("kind", KINDS)
def test_a_holder_of_tensors_is_copied_with_its_class_and_its_other_values(kind):
    def held(batch, name):
        return getattr(batch, name) if hasattr(batch, name) else batch[name]

    given = kind(torch.ones(2), {"inner": [kind(torch.zeros(3), "text"), 7, None]})
    made = with_tensors(given, lambda tensor: tensor + 1)
    assert type(made) is type(given)
    assert made is not given
    assert held(made, "x").tolist() == [2, 2]
    inner, *rest = held(made, "y")["inner"]
    assert (held(inner, "x").tolist(), held(inner, "y"), rest) == ([1, 1, 1], "text", [7, None])
    assert held(given, "x").tolist() == [1, 1], "the user's own batch stays as it is"
    assert [name for name, _ in tensors_of(given)] == ["x", "y.inner.0.x"]


def test_what_holds_no_tensor_and_what_holds_itself_stay_themselves():
    model, own = torch.nn.Linear(2, 2), Plain("text")
    around = Plain(torch.ones(1))
    around.y = around
    made = with_tensors({"model": model, "own": own, "around": around}, lambda tensor: tensor + 1)
    assert made["model"] is model
    assert made["own"] is own
    assert made["around"].x.tolist() == [2]
    assert [name for name, _ in tensors_of(around)] == ["x"]


def test_a_default_dict_keeps_its_default_and_a_deque_its_length():
    made = with_tensors(defaultdict(list, x=deque([torch.ones(1)], maxlen=3)), lambda tensor: tensor + 1)
    assert made["none"] == []
    assert (made["x"].maxlen, made["x"][0].item()) == (3, 2)


def test_outputs_of_transformers_keep_their_class():
    outputs = pytest.importorskip("transformers.modeling_outputs")
    made = with_tensors(outputs.BaseModelOutput(last_hidden_state=torch.ones(1)), lambda tensor: tensor + 1)
    assert type(made) is outputs.BaseModelOutput
    assert made.last_hidden_state is made["last_hidden_state"]
    assert made.last_hidden_state.item() == 2


def test_a_jagged_tensor_is_one_tensor_of_the_batch():
    ragged = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(5, 3)], layout=torch.jagged)
    made = with_tensors({"x": ragged}, lambda tensor: tensor.to(torch.bfloat16))
    assert (made["x"].layout, made["x"].dtype) == (torch.jagged, torch.bfloat16)
    other = torch.nested.nested_tensor([torch.ones(2, 3), torch.zeros(5, 3)], layout=torch.jagged)
    assert fingerprint(ragged) != fingerprint(other)


@pytest.mark.parametrize("kind", [dict, OrderedDict, UserDict, SimpleNamespace, Tokens])
def test_any_of_them_is_padded(kind):
    tokens = torch.ones(1, 3, dtype=torch.long)
    padded = pad_to_multiple(kind(input_ids=tokens, labels=tokens), 4)
    assert type(padded) is kind
    assert [part.tolist() for _, part in tensors_of(padded)] == [[[1, 1, 1, 0]], [[1, 1, 1, -100]]]
