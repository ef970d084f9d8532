"""What an arm notes of its products and gradients: emulated layers on the CPU, sound and strained."""

import math
from base64 import b64decode

import numpy as np
import pytest
import torch

from helpers.arms import CASE, spec
from pytest_fp8 import Case
from pytest_fp8.casts import BLOCK, E4M3, E5M2, LINE, MX, SQUARE, TENSOR, Cast, promised_casts
from pytest_fp8.questions.numerics.evidence import LATER
from pytest_fp8.recipes import DGRAD, FPROP, RECOMPUTE, WGRAD
from pytest_fp8.worker.answers.gradients import rotated, sketch
from pytest_fp8.worker.server import ArmServer
from pytest_fp8.worker.watch.product_accuracy import Expected, Operand, square_amax

pytestmark = pytest.mark.slow


def serve(case=CASE, **workload):
    return ArmServer(spec(case, **workload))


def products(server):
    return server.numerics(moved=False)["products"]


def gradients(server):
    return server.numerics(moved=False)["gradients"]


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
    draws = server.moved_gradients(draws=2)
    assert len({draw["sketches"]["leave.weight"] for draw in [first["moved"], *draws]}) == 3
    assert server.moved_gradients(draws=2) == draws


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
    weights = [(numbers(each) - right).norm() for each in server.moved_gradients(draws=4)]
    operands = [(numbers(each) - right).norm() for each in server.moved_gradients(draws=0, operands=4)]
    assert max(operands) > 2 * max(weights)
    assert torch.equal(numbers(server.numerics(moved=False)["gradients"]), right)


def test_weights_and_gradients_are_left_as_they_were():
    server = serve()
    model = server.engine.model
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    products(server)
    assert all(type(p) is torch.nn.Parameter for p in model.parameters())
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    gradients(server)
    products(server)
    assert all(torch.equal(before[name], value) for name, value in model.named_parameters())
    assert hooks == [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]


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


def test_an_arm_repeats_its_gradients_and_moved_weights_give_others():
    server = serve()
    one = gradients(server)
    both = server.numerics(moved=True)
    moved = both["moved"]
    assert one == both["gradients"]
    numbers = [np.frombuffer(b64decode(g["sketches"]["0.weight"]), dtype=np.float32) for g in (one, moved)]
    assert 0.001 < np.linalg.norm(numbers[1] - numbers[0]) / np.linalg.norm(numbers[0]) < 0.3
    assert gradients(server) == one, "the weights are put back"


def micro_batches(model, batch, optimizer, precision):
    total = 0.0
    for part in batch.chunk(2):
        with precision():
            loss = (model(part) - part).float().pow(2).mean() / 2
        loss.backward()
        total = total + loss.detach()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-6)
    optimizer.step()
    optimizer.zero_grad()
    return total


def large_batch(step):
    return torch.randn(32, 32)


def test_gradients_of_micro_batches_are_summed_and_not_clipped():
    whole = gradients(serve(batch=large_batch))["sketches"]
    parts = gradients(serve(batch=large_batch, loss=None, step=micro_batches))["sketches"]
    for name in whole:
        one, two = (np.frombuffer(b64decode(each[name]), dtype=np.float32) for each in (whole, parts))
        assert np.linalg.norm(one - two) < 0.1 * np.linalg.norm(one)


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


@pytest.mark.parametrize("scales", [TENSOR, LINE, BLOCK, SQUARE, MX])
@pytest.mark.parametrize(("name", "lowest", "highest"), [(E4M3, 30, 33), (E5M2, 24, 27)])
def test_a_cast_costs_what_its_mantissa_says(scales, name, lowest, highest):
    values = torch.randn(200, 300, generator=torch.Generator().manual_seed(0))
    squares = square_amax(values)[torch.arange(200) // 128]
    cast, underflow = Operand(values, values.abs().amax(), squares).cast(Cast(name, scales))
    noise = (cast - values).square().sum() / values.square().sum()
    assert lowest < -10 * math.log10(noise) < highest
    assert underflow < 0.01


def test_outliers_cost_a_tensors_scale_more_than_a_lines():
    values = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)) * 1e-3
    values[0] *= 1e6
    operand = Operand(values, values.abs().amax())
    assert operand.cast(Cast(E4M3, TENSOR))[1] > 0.9
    assert operand.cast(Cast(E4M3, LINE))[1] < 0.01


def test_a_product_is_compared_with_the_exact_one():
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(64, 128, generator=generator) for _ in range(2))
    expected = Expected(Operand(left, left.abs().amax()), Operand(right, right.abs().amax()), None, torch.float32)
    values, _, gain, noise, *_ = expected.compare(2 * left @ right.t()).tolist()
    assert (values, gain, noise) == (64 * 64, pytest.approx(2, abs=1e-5), pytest.approx(1, abs=1e-5))


def test_torchaos_casts_are_the_librarys():
    from pytest_fp8.backends.torchao import torchao_config

    for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp"):
        config = torchao_config(recipe, emulated=True)
        live = {
            FPROP: (config.cast_config_input, config.cast_config_weight),
            DGRAD: (config.cast_config_grad_output, config.cast_config_weight_for_grad_input),
            WGRAD: (config.cast_config_grad_output_for_grad_weight, config.cast_config_input_for_grad_weight),
        }
        for role, casts in promised_casts("torchao", recipe, {}).items():
            for cast, mine in zip(casts, live[role], strict=True):
                assert cast.format in str(mine.target_dtype)
                assert cast.scales == {"tensorwise": "tensor", "axiswise": "line"}[mine.scaling_granularity.value]
                assert cast.powers == config.round_scales_to_power_of_2
