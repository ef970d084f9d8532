"""A model, its data and its loss."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from pytest_fp8 import Workload

CLASSES = 16


def build():
    """Your model. FP8 takes Linears whose sizes are multiples of 16."""
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, CLASSES))


def batch(step):
    """Your data: 128 rows, a multiple of 16. The generators are seeded for each step."""
    x = torch.randn(128, 64)
    return x, x[:, :CLASSES].argmax(1)


def loss(model, batch):
    x, classes = batch
    return functional.cross_entropy(model(x).float(), classes)


@pytest.fixture
def fp8_workload():
    return Workload(build, batch, loss)


@pytest.mark.fp8(backend="torchao", recipe="tensorwise", emulated=True, name="model")
def test_without_a_gpu(fp8_pair):
    fp8_pair.assert_layers()
    fp8_pair.assert_numerics()
    fp8_pair.assert_loss()
    fp8_pair.assert_checkpoints()


@pytest.mark.fp8(backend="torchao", recipe="tensorwise", name="model")
def test_on_a_gpu(fp8_pair):
    """A model as small as this one is not faster in FP8: ask assert_faster() of yours."""
    fp8_pair.assert_layers()
    fp8_pair.assert_numerics()
    fp8_pair.assert_loss()
    fp8_pair.assert_checkpoints()
