"""Tensors in batches of any class: found, named, placed and told apart."""

from __future__ import annotations

import dataclasses
from collections import UserDict
from typing import Any, NamedTuple

import pytest
import torch

from pytest_fp8.zoo.batch import arrays_of, tensors_of, with_tensors
from pytest_fp8.zoo.data import fingerprint

pytestmark = pytest.mark.slow


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


def encoding(x, y=None):
    return UserDict({"x": x, "y": y})


KINDS = [Named, Frozen, Slotted, Plain, encoding]


@pytest.mark.parametrize("kind", KINDS)
def test_a_holder_of_tensors_is_copied_with_its_class_and_its_other_values(kind):
    def held(batch, name):
        return batch[name] if isinstance(batch, UserDict) else getattr(batch, name)

    given = kind(torch.ones(2), {"inner": [kind(torch.zeros(3), "text"), 7, None]})
    made = with_tensors(given, lambda tensor: tensor + 1)
    assert type(made) is type(given)
    assert made is not given
    assert held(made, "x").tolist() == [2, 2]
    inner, *rest = held(made, "y")["inner"]
    assert (held(inner, "x").tolist(), held(inner, "y"), rest) == ([1, 1, 1], "text", [7, None])
    assert held(given, "x").tolist() == [1, 1], "the user's own batch stays as it is"
    assert [name for name, _ in tensors_of(given)] == ["x", "y.inner.0.x"]


@pytest.mark.parametrize("kind", KINDS)
def test_other_numbers_in_any_holder_are_other_data(kind):
    assert fingerprint(kind(torch.ones(2), [torch.zeros(2)])) != fingerprint(kind(torch.ones(2), [torch.ones(2)]))
    assert fingerprint(kind(torch.ones(2), 3)) == fingerprint(kind(torch.ones(2), 3)) != 0


def test_what_holds_no_tensor_and_what_holds_itself_stay_themselves():
    model, own = torch.nn.Linear(2, 2), Plain("text")
    around = Plain(torch.ones(1))
    around.y = around
    made = with_tensors({"model": model, "own": own, "around": around}, lambda tensor: tensor + 1)
    assert made["model"] is model
    assert made["own"] is own
    assert made["around"].x.tolist() == [2]
    assert [name for name, _ in tensors_of(around)] == ["x"]


def test_arrays_are_found_by_name():
    numpy = pytest.importorskip("numpy")
    assert arrays_of({"x": torch.ones(1), "more": Plain(numpy.ones(2), 3)}) == ["more.x"]
    assert arrays_of(numpy.ones(1)) == ["the batch"]
    assert arrays_of({"x": torch.ones(1), "name": "text"}) == []
