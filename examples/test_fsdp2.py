"""FSDP2 on two GPUs: start it with `pytest`, not with torchrun. Without GPUs the ranks are two processes on the CPU."""

import pytest
from torch import distributed, nn, randn
from torch.distributed.fsdp import fully_shard

from pytest_fp8 import Workload


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def batch(step):
    """This rank's part of the batch: the generators of all ranks are seeded alike."""
    return randn(256, 64).chunk(distributed.get_world_size())[distributed.get_rank()]


def loss(model, x):
    return (model(x) - x.sin()).float().square().mean()


def parallelize(model, mesh):
    """Called once the model is converted and compiled, before the optimizer is made."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


@pytest.fixture
def fp8_workload():
    return Workload(Model, batch, loss, parallelize=parallelize)


@pytest.mark.fp8(backend="torchao", gpus=2, parallel="own", emulated=True, name="fsdp2")
def test_without_gpus(fp8_pair):
    fp8_pair.assert_layers()
    fp8_pair.assert_numerics()
    fp8_pair.assert_loss()


@pytest.mark.fp8(backend="torchao", gpus=2, parallel="own", name="fsdp2")
def test_on_two_gpus(fp8_pair):
    fp8_pair.assert_layers()
    fp8_pair.assert_numerics()
    fp8_pair.assert_loss()
