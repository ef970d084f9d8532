"""Workloads of real libraries that were failed once: sparse gradients, rates of None, FP8 in build()."""

from __future__ import annotations

import pytest

pytest.importorskip("torchao")

from helpers.loops import serve
from pytest_fp8.backends.linears import reason_to_skip
from pytest_fp8.recipes import Stays
from pytest_fp8.worker.training.step import WorkloadError

pytestmark = pytest.mark.slow

SPARSE = """
    import pytest, torch
    from torch import nn
    from pytest_fp8 import Workload

    @pytest.fixture
    def fp8_workload():
        return Workload(
            lambda: nn.Sequential(nn.Embedding(256, 64, sparse=True), nn.Linear(64, 128), nn.Linear(128, 64)),
            batch=lambda step: torch.randint(0, 256, (128,)),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            loss=lambda model, x: (model(x) - torch.sin(x[:, None] * torch.arange(64) / 64)).float().square().mean(),
        )

    @pytest.mark.fp8(emulated=True)
    def test_all(fp8_pair):
        fp8_pair.assert_layers()
        fp8_pair.assert_numerics()
        fp8_pair.assert_loss()
        fp8_pair.assert_checkpoints()
"""


def test_sparse_gradients_are_gradients(pytester):
    pytester.makepyfile(SPARSE)
    pytester.runpytest("--fp8-strict").assert_outcomes(passed=1)


def test_a_model_that_build_converts_is_refused():
    def build():
        import torch
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 32))
        return convert_to_float8_training(model, config=Float8LinearConfig(emulate=True))

    with pytest.raises(WorkloadError, match="a model with FP8 layers: 0, 1") as failure:
        serve(build=build, loss=lambda model, x: model(x).float().square().mean())
    assert "Workload(convert=...)" in failure.value.fp8_next


def test_an_optimizer_may_have_no_rate():
    def optimizer(parameters):
        import torch

        class Own(torch.optim.SGD):
            def step(self, closure=None):
                rate, self.param_groups[0]["lr"] = self.param_groups[0]["lr"], 0.1
                super().step(closure)
                self.param_groups[0]["lr"] = rate

        own = Own(parameters, lr=0.1)
        own.param_groups[0]["lr"] = None
        return own

    server = serve(optimizer=optimizer, loss=lambda model, x: (model(x) - x).float().square().mean())
    course = server.curve(seed=0, steps=2)["course"]
    assert course["rates"] == [[], [], []]


@pytest.mark.parametrize("name", ["lm_head", "model.lm_head.original_module", "lm_head.modules_to_save.default"])
def test_a_head_of_which_peft_trains_a_copy_stays_a_head(name):
    assert reason_to_skip(name, 64, 256).kind is Stays.HEAD
    assert reason_to_skip(name.replace("lm_head", "up_proj"), 64, 256) is None
