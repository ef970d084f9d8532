"""Tensors of which each rank holds a part, as a user's own script may have them without a way of ours."""

import sys
from types import ModuleType

import pytest
import torch

from pytest_fp8.worker.notes import weights_of

pytestmark = pytest.mark.slow


def test_deepspeeds_placeholders_are_known_wherever_deepspeed_is_loaded(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", ModuleType("deepspeed"))
    model = torch.nn.Linear(1, 1, bias=False)
    model.weight = torch.nn.Parameter(torch.empty(0))
    model.weight.ds_id, model.weight.ds_shape = 0, (32, 64)
    model.weight.ds_tensor = torch.zeros(1024)
    found = weights_of(model)["weight"]
    assert (tuple(found.shape), found.digest) == ((32, 64), "")
