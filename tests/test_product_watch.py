"""What an arm notes of its products: emulated layers on the CPU, sound and strained."""

from collections import Counter

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from helpers.watched import products, serve
from pytest_fp8 import Case
from pytest_fp8.recipes import DGRAD, FPROP, RECOMPUTE, WGRAD

pytestmark = pytest.mark.slow


def off(found):
    """How far each product is from what the recipe's own casts give, in dB."""
    return [abs(p["own_sqnr"] - p["sqnr"]) for p in found if p["power"]]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_emulated_products_are_what_the_recipes_casts_give_also_after_training_steps(recipe):
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


def test_pad_rows_leave_nothing_of_a_product_by_the_recipe_s_own_casts():
    def padded(step):
        return torch.cat([0.1 * torch.randn(48, 32), torch.full((16, 32), 1e6)])

    def loss(model, x):
        return model(x)[:48].float().square().mean()

    found = products(serve(build=lambda: torch.nn.Linear(32, 32), batch=padded, loss=loss))
    [wgrad] = [each for each in found if each["role"] == WGRAD]
    assert wgrad["gain"] == wgrad["own_gain"] == 0.0
    assert wgrad["underflow"] == 0.75
