import pytest
from torch import nn, randn

from pytest_fp8 import Workload


def build():
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))


@pytest.fixture
def fp8_workload():
    return Workload(build, batch=lambda step: randn(128, 64), loss=lambda model, x: (model(x) - x).square().mean())


@pytest.mark.fp8(backend="torchao", recipe="tensorwise", emulated=True)
def test_my_model(fp8_pair):
    fp8_pair.assert_layers()
    fp8_pair.assert_numerics()
    fp8_pair.assert_loss()
