"""What an arm notes of an evaluation's products, on a CPU: it is looked at, and leaves the arm as it was."""

import pytest
import torch

from helpers.watched import serve
from pytest_fp8.questions.numerics.evidence import LATER
from pytest_fp8.recipes import FPROP

pytestmark = pytest.mark.slow


def test_an_evaluation_is_looked_at_and_leaves_the_arm_as_it_was():
    server = serve()
    found = server.numerics(moved=False)
    linears = [name for name, module in server.engine.model.named_modules() if isinstance(module, torch.nn.Linear)]
    for look in ("evaluated", "evaluated_later"):
        assert [(p["layer"], p["role"]) for p in found[look]] == [(name, FPROP) for name in linears]
        assert all(abs(p["own_sqnr"] - p["sqnr"]) < 0.1 for p in found[look])
    assert server.engine.model.training
    layer = server.engine.model[0]
    own = layer.forward
    layer.forward = lambda x: own(x) if layer.training else 2 * own(x)
    again = server.numerics(moved=False)
    assert next(p["gain"] for p in again["evaluated"]) == pytest.approx(2, rel=0.02)
    assert again["products"] == found["products"]


def test_an_evaluation_asks_for_no_batch_that_a_curve_would_not_ask_for():
    batches = [torch.randn(32, 32) for _ in range(2 * LATER)]

    def build():
        return torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32))

    server = serve(build=build, batch=lambda step: batches[step])
    assert server.numerics(moved=False)["evaluated"]


def test_a_layer_that_cannot_compute_without_gradients_is_told_with_its_error():
    def refuse(module, given):
        if not torch.is_grad_enabled():
            raise RuntimeError("no kernel for inference")

    server = serve()
    server.engine.model[0].register_forward_pre_hook(refuse)
    found = server.numerics(moved=False)
    assert found["evaluation_error"] == "RuntimeError: no kernel for inference"
    assert found["evaluated"] == []


def test_a_model_that_cannot_be_evaluated_alone_has_no_such_products():
    class Eager(torch.nn.Sequential):
        def forward(self, x):
            if not self.training:
                raise RuntimeError("trains only")
            return super().forward(x)

    server = serve(build=lambda: Eager(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)))
    found = server.numerics(moved=False)
    assert found["evaluated"] == found["evaluated_later"] == []
    assert found["products"]
    assert server.engine.model.training
