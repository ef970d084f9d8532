"""What an arm notes of its products, evaluations and gradients: emulated layers on the CPU, sound and strained."""

from __future__ import annotations

from base64 import b64decode
from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from helpers.watched import gradients, products, serve
from pytest_fp8 import Case
from pytest_fp8.recipes import DGRAD, FPROP, RECOMPUTE, WGRAD
from pytest_fp8.worker.record.gradients import rotated, sketch

pytestmark = pytest.mark.slow


def off(found):
    """How far each product is from what the recipe's own casts give, in dB."""
    return [abs(p["own_sqnr"] - p["sqnr"]) for p in found if p["power"]]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_emulated_products_are_what_the_recipes_casts_give_after_training_too(recipe):
    server = serve(Case("own", "torchao", recipe, emulated=True))
    start = {name: value.detach().clone() for name, value in server.engine.model.named_parameters()}
    found = server.numerics(moved=False)
    assert {p["role"] for p in found["products"]} == {FPROP, DGRAD, WGRAD}
    assert max(off(found["products"]) + off(found["later"])) < 0.1
    high = [p["sqnr"] for p in found["products"] if p["role"] == WGRAD]
    assert min(high) > 50 if recipe == "rowwise_with_gw_hp" else max(high) < 40
    assert [(p["layer"], p["role"]) for p in found["later"]] == [(p["layer"], p["role"]) for p in found["products"]]
    assert any(not torch.equal(start[name], value) for name, value in server.engine.model.named_parameters())
    assert server.numerics(moved=False) == found, "an arm repeats itself"


class AddsByItself(torch.autograd.Function):
    """Adds to its weight's gradient by itself, and gives none."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.save_for_backward(x)
        ctx.layer = layer
        return x @ layer._parameters["weight"].t()

    @staticmethod
    def backward(ctx, dy):
        (x,), held = ctx.saved_tensors, ctx.layer.weight
        dw = dy.reshape(-1, dy.shape[-1]).t() @ x.reshape(-1, x.shape[-1])
        held.grad = dw if held.grad is None else held.grad + dw
        return dy @ held, None


def test_a_layer_that_adds_to_its_weight_s_gradient_by_itself_has_no_wgrad_to_compare():
    server = serve(build=lambda: torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32, bias=False)))
    layer = server.engine.model[1]
    layer.forward = lambda x: AddsByItself.apply(x, layer)
    roles = {p["role"] for p in products(server) if p["layer"] == "1"}
    assert roles == {FPROP, DGRAD}


class Shared(torch.nn.Module):
    """Two layers of one input, one of them called twice."""

    def __init__(self):
        super().__init__()
        self.q, self.k = torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)

    def forward(self, x):
        x = x.clone().requires_grad_()
        return self.q(x) + self.k(x) + self.q(2 * x)


def penalised(model, batch):
    return (model(batch) - batch).float().pow(2).mean() + model.q.weight.float().pow(2).sum()


def recomputed(reentrant):
    class Recomputed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.enter = torch.nn.Linear(32, 32)
            self.block = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))

        def forward(self, x):
            return checkpoint(self.block, self.enter(x), use_reentrant=reentrant)

    return Recomputed


def with_hook():
    """A hook of the user's own changes the output; what the layer multiplied is right all the same."""
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 32))
    model[0].register_forward_hook(lambda module, given, output: 3 * output)
    return model


def frozen():
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 32), torch.nn.Linear(32, 32))
    model[1].weight.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("parts", "roles"),
    [
        ({"build": Shared, "loss": penalised}, {FPROP: 3, DGRAD: 3, WGRAD: 3}),
        ({"build": recomputed(True)}, {FPROP: 3, DGRAD: 2, WGRAD: 3, RECOMPUTE: 2}),
        # It ends as soon as it has what the backward pass needs.
        ({"build": recomputed(False)}, {FPROP: 3, DGRAD: 2, WGRAD: 3, RECOMPUTE: 1}),
        ({"build": with_hook}, {FPROP: 2, DGRAD: 1, WGRAD: 2}),
        ({"build": frozen}, {FPROP: 3, DGRAD: 2, WGRAD: 2}),
    ],
    ids=["shared input", "reentrant", "recomputed", "hook", "frozen"],
)
def test_each_call_is_compared_by_itself(parts, roles):
    found = products(serve(**parts))
    assert Counter(p["role"] for p in found) == roles
    assert max(off(found)) < 0.1


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


def test_a_layer_that_cannot_compute_without_gradients_is_told_with_its_error():
    def refuse(module, given):
        if not torch.is_grad_enabled():
            raise RuntimeError("no kernel for inference")

    server = serve()
    server.engine.model[0].register_forward_pre_hook(refuse)
    found = server.numerics(moved=False)
    assert found["evaluation_error"] == "RuntimeError: no kernel for inference"
    assert found["evaluated"] == []


class Codebook(torch.nn.Module):
    """A buffer that each forward pass replaces by another tensor, and that the output depends on."""

    def __init__(self):
        super().__init__()
        self.enter, self.leave = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)
        self.register_buffer("codes", torch.ones(64))

    def forward(self, x):
        self.codes = self.codes + 0.3 * self.codes.roll(1)
        return self.leave(self.enter(x) * self.codes)


def test_gradients_are_those_of_equal_buffers_however_often_they_are_asked():
    server = serve(build=Codebook)
    first, again = (server.numerics(moved=True) for _ in range(2))
    assert first["gradients"]["sketches"] == again["gradients"]["sketches"]
    assert first["moved"]["sketches"] == again["moved"]["sketches"]
    draws = server.moved("gradients", draws=2)
    assert len({draw["sketches"]["leave.weight"] for draw in [first["moved"], *draws]}) == 3
    assert server.moved("gradients", draws=2) == draws


def test_operands_moved_row_by_row_move_gradients_that_cancel_between_rows():
    def compare(model, x):
        scores = model(x).float().sum(-1).view(-1, 4)
        return torch.nn.functional.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long))

    def numbers(gradients):
        return torch.frombuffer(bytearray(b64decode(gradients["sketches"]["0.bias"])), dtype=torch.float32)

    server = serve(
        build=lambda: torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh(), torch.nn.Linear(32, 16)),
        batch=lambda step: 0.1 * torch.randn(64, 32),
        loss=compare,
    )
    right = numbers(server.numerics(moved=False)["gradients"])
    weights = [(numbers(each) - right).norm() for each in server.moved("gradients", draws=4)]
    operands = [(numbers(each) - right).norm() for each in server.moved("gradients", draws=0, operands=4)]
    assert max(operands) > 2 * max(weights)
    assert torch.equal(numbers(server.numerics(moved=False)["gradients"]), right)


def test_gradients_repeat_and_moved_weights_give_others():
    server = serve()
    model = server.engine.model
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    one, both = gradients(server), server.numerics(moved=True)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    numbers = [np.frombuffer(b64decode(g["sketches"]["0.weight"]), dtype=np.float32) for g in (one, both["moved"])]
    assert 0.001 < np.linalg.norm(numbers[1] - numbers[0]) / np.linalg.norm(numbers[0]) < 0.3
    assert one == both["gradients"] == gradients(server)
    assert all(type(p) is torch.nn.Parameter and torch.equal(before[n], p) for n, p in model.named_parameters())
    assert hooks == [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]


def test_a_sketch_keeps_lengths_and_angles():
    places = rotated(torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    one, two = (torch.randn(300, 500, generator=generator) for _ in range(2))
    assert float(sketch(one, 1, places).norm() / one.norm()) == pytest.approx(1, abs=0.1)
    assert float(sketch(one, 1, places) @ sketch(two, 1, places)) / (300 * 500) == pytest.approx(0, abs=0.1)
    both = sketch(one, 1, places) + sketch(two, 1, places)
    torch.testing.assert_close(sketch(one + two, 1, places), both, atol=1e-3, rtol=1e-3)
    few = torch.zeros(2048, 1024)
    few[:, 7] = 1.0
    assert float(sketch(few, 1, places).norm() / few.norm()) == pytest.approx(1, abs=0.1), "one column"
    flat = torch.ones(2048, 1024)
    assert float(sketch(flat, 1, places).norm() / flat.norm()) == pytest.approx(1, abs=0.1), "rank one"
