"""A Linear that hangs in two places of a model is converted in both, and stays one module."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from helpers import te_stand_in
from pytest_fp8 import Case
from pytest_fp8.backends import backend

pytest.importorskip("torchao")

pytestmark = pytest.mark.slow


each = pytest.mark.parametrize(
    ("name", "library", "recipe"),
    [
        ("torchao", contextlib.nullcontext, "tensorwise"),
        ("transformer_engine", te_stand_in.installed, "delayed"),
    ],
)


class Tower(nn.Module):
    def __init__(self, shared):
        super().__init__()
        self.shared, self.own = shared, nn.Linear(64, 32)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = Tower(nn.Linear(16, 64))
        self.other = Tower(self.one.shared)
        self.alias = self.one.own


@each
def test_a_shared_linear_is_one_fp8_layer_under_both_names(name, library, recipe):
    with library():
        model, chosen = Model(), backend(name)
        weight = model.one.shared.weight
        made = chosen.convert(model, Case("own", name, recipe, emulated=name == "torchao"))
        assert chosen.is_fp8_layer(model.one.shared)
        assert model.other.shared is model.one.shared
        assert model.alias is model.one.own
        assert model.one.shared.weight is weight
        assert made.converted == ["one.shared", "one.own", "other.own"]
        assert not [module for module in model.modules() if type(module) is torch.nn.Linear]


@each
def test_a_model_that_is_itself_a_linear_is_returned_as_a_new_object(name, library, recipe):
    with library():
        chosen, case = backend(name), Case("own", name, recipe, emulated=name == "torchao")
        made = chosen.prepare(nn.Linear(16, 32), lambda model: torch.optim.SGD(model.parameters()), case)
        assert chosen.is_fp8_layer(made.model)
        assert made.conversion.converted == [""]
