"""FSDP2 after an exception inside a forward pass, as where a model cannot be evaluated: on two processes."""

from __future__ import annotations

import pytest

from helpers.arms import call
from helpers.ranks import own, two_ranks

pytestmark = pytest.mark.slow


def test_weights_are_sharded_again_and_training_goes_on():
    def goes_on():
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        from pytest_fp8.worker.tensors import Sharded
        from pytest_fp8.worker.training.ranks import forget_aborted

        class OnlyTrains(torch.nn.Sequential):
            def forward(self, x):
                x = super().forward(x)
                assert self.training
                return x

        model = OnlyTrains(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        mesh = init_device_mesh("cpu", (2,))
        for module in (model[0], model):
            fully_shard(module, mesh=mesh)
        aborted = False
        try:
            model.eval()(torch.ones(2, 8))
        except AssertionError:
            aborted = True
        assert aborted
        assert forget_aborted(model) is hasattr(model, "reset_iter_state")
        if hasattr(model, "reset_iter_state"):
            assert all(Sharded.has(parameter) for parameter in model.parameters())
            model.train()(torch.ones(2, 8)).sum().backward()
            assert all(parameter.grad is not None for parameter in model.parameters())
        return "went on"

    with two_ranks() as arm:
        arm.build(own())
        assert call(arm, goes_on) == "went on"
