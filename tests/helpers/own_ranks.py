"""The beginning of test modules with an own model on several ranks."""

# What it imports is imported once: pytester forgets what a session imports, and torch cannot come twice.
import torch.distributed.algorithms._checkpoint.checkpoint_wrapper
import torch.distributed.fsdp
import torch.nn.parallel  # noqa: F401

HEAD = """
import pytest
from torch import distributed as dist, nn, no_grad, randn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from pytest_fp8 import Workload


def block():
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))


def build():
    return nn.Sequential(block(), block())


def batch(step):
    return randn(256, 64).chunk(dist.get_world_size())[dist.get_rank()]


def loss(model, x):
    return (model(x) - x.sin()).square().mean()


def asked(parallel="own", **more):
    return pytest.mark.fp8(emulated=True, gpus=2, parallel=parallel, steps=8, seeds=2, **more)


def workload(**changes):
    @pytest.fixture
    def fp8_workload():
        return Workload(**{"build": build, "batch": batch, "loss": loss, **changes})

    return fp8_workload
"""
