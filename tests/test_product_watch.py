"""What an arm notes of its products: emulated layers on the CPU, sound and strained."""

import pytest
import torch

from helpers.watched import products, serve
from pytest_fp8 import Case
from pytest_fp8.recipes import DGRAD, FPROP, RECOMPUTE, WGRAD

pytestmark = pytest.mark.slow


def distances(server):
    """(role, SQNR of the recipe's own casts less the product's) of each product."""
    return [(p["role"], p["own_sqnr"] - p["sqnr"]) for p in products(server) if p["power"]]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_emulated_products_are_what_the_recipes_casts_give(recipe):
    server = serve(Case("own", "torchao", recipe, emulated=True))
    found = distances(server)
    assert {role for role, _ in found} == {FPROP, DGRAD, WGRAD}
    assert all(abs(far) < 0.1 for _, far in found)
    high = [p["sqnr"] for p in products(server) if p["role"] == WGRAD]
    assert min(high) > 50 if recipe == "rowwise_with_gw_hp" else max(high) < 40


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_products_are_looked_at_again_after_training_steps(recipe):
    server = serve(Case("own", "torchao", recipe, emulated=True))
    start = {name: value.detach().clone() for name, value in server.engine.model.named_parameters()}
    found = server.numerics(moved=False)
    assert [(p["layer"], p["role"]) for p in found["later"]] == [(p["layer"], p["role"]) for p in found["products"]]
    assert all(abs(p["own_sqnr"] - p["sqnr"]) < 0.1 for p in found["later"] if p["power"])
    assert any(not torch.equal(start[name], value) for name, value in server.engine.model.named_parameters())
    assert server.numerics(moved=False) == found, "an arm repeats itself"


def test_a_weight_that_is_not_renewed_shows_after_training_steps():
    server = serve()
    server.engine.restart(0)
    layer = server.engine.model[0]
    kept = layer.weight.detach().clone()
    layer.forward = lambda x: torch.nn.functional.linear(x, layer.weight + (kept - layer.weight).detach(), layer.bias)
    found = server.numerics(moved=False)

    def distance(products):
        return max(p["own_sqnr"] - p["sqnr"] for p in products if (p["layer"], p["role"]) == ("0", FPROP))

    assert distance(found["products"]) < 0.1
    assert distance(found["later"]) > 1


def wide():
    return torch.nn.Sequential(torch.nn.Linear(32, 1280), torch.nn.GELU(), torch.nn.Linear(1280, 32))


@pytest.mark.parametrize(("lines", "role"), [(slice(-16, None), FPROP), (slice(0, 16), FPROP)])
def test_a_tile_at_either_end_of_a_wide_layer_is_among_what_is_compared(lines, role):
    server = serve(build=wide)
    layer = server.engine.model[0]
    own, written = layer.forward, torch.ones(1280)
    written[lines] = 0
    layer.forward = lambda x: own(x) * written
    far = {(p["layer"], p["role"]): p["own_sqnr"] - p["sqnr"] for p in products(server)}
    assert far["0", role] > 2
    assert far["2", role] < 0.1


def test_a_layer_that_adds_to_its_weight_s_gradient_by_itself_has_no_wgrad_to_compare():
    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return x @ weight.t()

        @staticmethod
        def backward(ctx, dy):
            x, weight = ctx.saved_tensors
            dw, held = dy.reshape(-1, dy.shape[-1]).t() @ x.reshape(-1, x.shape[-1]), layer.weight
            held.grad = dw if held.grad is None else held.grad + dw
            return dy @ weight, None

    server = serve(build=lambda: torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32, bias=False)))
    layer = server.engine.model[1]
    layer.forward = lambda x: Fused.apply(x, layer._parameters["weight"])
    found = {(p["layer"], p["role"]) for p in products(server)}
    assert {("1", FPROP), ("1", DGRAD)} <= found
    assert ("1", WGRAD) not in found


def shared_input():
    """Two layers of one input, one of them called twice; and a penalty on its weight."""

    class Shared(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k = torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)

        def forward(self, x):
            x = x.clone().requires_grad_()
            return self.q(x) + self.k(x) + self.q(2 * x)

    return Shared()


def penalised(model, batch):
    return (model(batch) - batch).float().pow(2).mean() + model.q.weight.float().pow(2).sum()


def test_each_call_is_compared_by_itself():
    found = distances(serve(build=shared_input, loss=penalised))
    assert len(found) == 9
    assert all(abs(far) < 0.1 for _, far in found)


def checkpointed(reentrant):
    def build():
        from torch.utils.checkpoint import checkpoint

        class Recomputed(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.enter = torch.nn.Linear(32, 32)
                self.block = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))

            def forward(self, x):
                return checkpoint(self.block, self.enter(x), use_reentrant=reentrant)

        return Recomputed()

    return build


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_products_are_compared_too(reentrant):
    found = distances(serve(build=checkpointed(reentrant)))
    roles = [role for role, _ in found]
    assert (roles.count(FPROP), roles.count(DGRAD), roles.count(WGRAD)) == (3, 2, 3)
    assert roles.count(RECOMPUTE) >= 1
    assert all(abs(far) < 0.1 for _, far in found)


def with_hook():
    """A hook of the user's own changes the output; what the layer multiplied is right all the same."""
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 32))
    model[0].register_forward_hook(lambda module, given, output: 3 * output)
    return model


def test_what_a_users_hook_makes_of_an_output_is_not_the_layers():
    assert all(abs(far) < 0.1 for _, far in distances(serve(build=with_hook)))


def frozen():
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 32), torch.nn.Linear(32, 32))
    model[1].weight.requires_grad_(False)
    return model


def test_a_frozen_weight_has_no_wgrad():
    found = [(p["layer"], p["role"]) for p in products(serve(build=frozen))]
    assert ("1", WGRAD) not in found
    assert {("1", DGRAD), ("0", WGRAD), ("2", WGRAD)} <= set(found)


def test_pad_rows_leave_nothing_of_a_product_by_the_recipe_s_own_casts():
    def padded(step):
        return torch.cat([0.1 * torch.randn(48, 32), torch.full((16, 32), 1e6)])

    def loss(model, x):
        return model(x)[:48].float().square().mean()

    found = products(serve(build=lambda: torch.nn.Linear(32, 32), batch=padded, loss=loss))
    [wgrad] = [each for each in found if each["role"] == WGRAD]
    assert wgrad["gain"] == wgrad["own_gain"] == 0.0
    assert wgrad["underflow"] == 0.75
