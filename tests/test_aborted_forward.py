"""FSDP2 after an exception inside a forward pass, as where a model cannot be evaluated: on two processes."""

from __future__ import annotations

import os
import socket

import pytest

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.slow


class OnlyTrains(torch.nn.Sequential):
    def forward(self, x):
        x = super().forward(x)
        assert self.training
        return x


def on_a_rank(rank, port):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from pytest_fp8.worker.state.shards import is_sharded
    from pytest_fp8.worker.training.ranks import forget_aborted

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo")
    model = OnlyTrains(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    mesh = init_device_mesh("cpu", (2,))
    for module in (model[0], model):
        fully_shard(module, mesh=mesh)
    with pytest.raises(AssertionError):
        model.eval()(torch.ones(2, 8))
    assert forget_aborted(model) is hasattr(model, "reset_iter_state")
    if hasattr(model, "reset_iter_state"):
        assert all(is_sharded(parameter) for parameter in model.parameters())
        model.train()(torch.ones(2, 8)).sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
    dist.destroy_process_group()


def test_weights_are_sharded_again_and_training_goes_on():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    torch.multiprocessing.spawn(on_a_rank, (port,), nprocs=2)
