"""What an arm notes of its products, evaluations and gradients: emulated layers on the CPU, sound and strained."""

from __future__ import annotations

import math
import threading
from base64 import b64decode
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torchao")

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from helpers.arms import spec, square
from helpers.nets import batch, closing, lbfgs, loop, net
from pytest_fp8 import Case
from pytest_fp8.arms.spec import ArmSpec
from pytest_fp8.backends.torchao import torchao_config
from pytest_fp8.backends.transformer_engine import TransformerEngine
from pytest_fp8.casts import BLOCK, E4M3, E5M2, GRADIENT, INPUT, LINE, MX, SQUARE, TENSOR, WEIGHT, Cast, promised_casts
from pytest_fp8.questions.numerics.products import LATER_DELAYED
from pytest_fp8.recipes import DGRAD, FPROP, RECOMPUTE, WGRAD
from pytest_fp8.worker.answers import numerics, recorded
from pytest_fp8.worker.record.accuracy import Expected, Operand, square_amax
from pytest_fp8.worker.record.gradients import rotated, sketch
from pytest_fp8.worker.record.probe import Probe
from pytest_fp8.worker.server import ArmServer
from pytest_fp8.worker.state.weights import moved_operands
from pytest_fp8.zoo.data import fingerprint
from pytest_fp8.zoo.shapes import SHAPES

pytestmark = pytest.mark.slow

TENSORWISE = Case("own", "torchao", "tensorwise", emulated=True)


def serve(case=TENSORWISE, **workload):
    return ArmServer(spec(case, **workload))


def products(server):
    return server.numerics(moved=False)["products"]


def off(found, *roles):
    """How far each product is from what the recipe's own casts give, in dB."""
    return [p["own_sqnr"] - p["sqnr"] for p in found if p["power"] and p["role"] in (roles or p["role"])]


# -- one product ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scales", [TENSOR, LINE, BLOCK, SQUARE, MX])
@pytest.mark.parametrize(("name", "lowest", "highest"), [(E4M3, 30, 33), (E5M2, 24, 27)])
def test_a_cast_costs_what_its_mantissa_says(scales, name, lowest, highest):
    lines = torch.randn(200, 300, generator=torch.Generator().manual_seed(0))
    squares = square_amax(lines)[torch.arange(200) // 128]
    cast, underflow = Operand(lines, lines.abs().amax(), squares).cast(Cast(name, scales))
    noise = (cast - lines).square().sum() / lines.square().sum()
    assert lowest < -10 * math.log10(noise) < highest
    assert underflow < 0.01


@pytest.mark.parametrize(("bias", "added", "share"), [(None, 2, 0), (1, 0, 1), (1, 2, 1), (1, -3, 0.44), (1, 1.2, 0)])
def test_an_error_is_the_bias_where_it_is_missing_or_added_twice(bias, added, share):
    """Weights of an earlier step, too, are off by one row that is the same everywhere."""
    left, right = torch.randn(64, 128), torch.randn(64, 128)
    operands = (Operand(each, each.abs().amax()) for each in (left, right))
    expected = Expected(*operands, None, torch.float32, bias and torch.full((64,), float(bias)))
    assert float(expected.compare(left @ right.t() + added)["of_bias"]) == pytest.approx(share, abs=1e-2)


def test_torchaos_casts_are_the_librarys():
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


# -- the products of a step -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_emulated_products_are_what_the_recipes_casts_give_after_training_too(recipe):
    server = serve(Case("own", "torchao", recipe, emulated=True))
    found = server.numerics(moved=False)
    assert {p["role"] for p in found["products"]} == {FPROP, DGRAD, WGRAD}
    assert max(map(abs, off(found["products"] + found["later"]))) < 0.1
    high = [p["sqnr"] for p in found["products"] if p["role"] == WGRAD]
    assert min(high) > 50 if recipe == "rowwise_with_gw_hp" else max(high) < 40
    assert [(p["layer"], p["role"]) for p in found["later"]] == [(p["layer"], p["role"]) for p in found["products"]]
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
    server = serve(build=lambda: nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32, bias=False)))
    layer = server.engine.model[1]
    layer.forward = lambda x: AddsByItself.apply(x, layer)
    assert {p["role"] for p in products(server) if p["layer"] == "1"} == {FPROP, DGRAD}


def shared():
    """Two layers of one input, one of them called twice."""

    def forward(model, x):
        x = x.clone().requires_grad_()
        return model.q(x) + model.k(x) + model.q(2 * x)

    return net(forward, q=(32, 32), k=(32, 32))


def penalised(model, batch):
    return square(model, batch) + model.q.weight.float().pow(2).sum()


def recomputed(reentrant=False):
    block = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    return net(
        lambda model, x: checkpoint(model.block, model.enter(x), use_reentrant=reentrant), enter=(32, 32), block=block
    )


def with_hook():
    """A hook of the user's own changes the output; what the layer multiplied is right all the same."""
    model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32))
    model[0].register_forward_hook(lambda module, given, output: 3 * output)
    return model


def frozen():
    model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, 32))
    model[1].weight.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("parts", "roles"),
    [
        ({"build": shared, "loss": penalised}, {FPROP: 3, DGRAD: 3, WGRAD: 3}),
        ({"build": lambda: recomputed(True)}, {FPROP: 3, DGRAD: 2, WGRAD: 3, RECOMPUTE: 2}),
        # It ends as soon as it has what the backward pass needs.
        ({"build": recomputed}, {FPROP: 3, DGRAD: 2, WGRAD: 3, RECOMPUTE: 1}),
        ({"build": with_hook}, {FPROP: 2, DGRAD: 1, WGRAD: 2}),
        ({"build": frozen}, {FPROP: 3, DGRAD: 2, WGRAD: 2}),
    ],
    ids=["shared input", "reentrant", "recomputed", "hook", "frozen"],
)
def test_each_call_is_compared_by_itself(parts, roles):
    found = products(serve(**parts))
    assert Counter(p["role"] for p in found) == roles
    assert max(map(abs, off(found))) < 0.1


def test_layers_that_run_side_by_side_get_their_own_weights_back():
    left_in, right_in, left_out, seen = threading.Event(), threading.Event(), threading.Event(), []

    class Left(nn.Linear):
        def forward(self, x):
            left_in.set()
            assert right_in.wait(60)
            return super().forward(x)

    class Right(nn.Linear):
        def forward(self, x):
            right_in.set()
            assert left_out.wait(60)
            return super().forward(x)

    class Noting(Probe):
        views = True

        def called(self, call, output):
            seen.append(call.name)

    layers = {"left": Left(8, 8), "right": Right(8, 8)}
    weights = [layer.weight for layer in layers.values()]
    with Noting(layers, torch.device("cpu")).watching(), ThreadPoolExecutor(2) as pool:
        left = pool.submit(layers["left"], torch.randn(4, 8))
        assert left_in.wait(60)
        right = pool.submit(layers["right"], torch.randn(4, 8))
        left.result()
        left_out.set()
        right.result()
    assert seen == ["left", "right"]
    assert all(layer.weight is weight for layer, weight in zip(layers.values(), weights, strict=True))


def test_an_evaluation_is_looked_at_and_leaves_the_arm_as_it_was():
    server = serve()
    found = server.numerics(moved=False)
    for look in ("evaluated", "evaluated_later"):
        assert [(p["layer"], p["role"]) for p in found[look]] == [("0", FPROP), ("2", FPROP)]
        assert max(map(abs, off(found[look]))) < 0.1
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
    assert (found["evaluated"], found["evaluation_error"]) == ([], "RuntimeError: no kernel for inference")


def test_a_large_batch_of_the_suites_models_is_recorded_in_part_and_trained_whole(monkeypatch):
    """Every product is judged on the beginning of the batch, and gradients on all of it."""
    monkeypatch.setattr(recorded, "TOKENS", 48)
    case = Case("micro", "torchao", "tensorwise", emulated=True)
    engine = ArmServer(ArmSpec(case, "cpu", None, threads=1)).engine
    whole, cut = engine.training_batch(0, 3), recorded.recorded_batch(engine, 0, 3)
    assert (whole["input_ids"].shape, cut["input_ids"].shape) == ((4, 24), (1, 48))
    assert all(cut[name].flatten().equal(whole[name].flatten()[:48]) for name in whole)
    rows = []
    engine.model.lm_head.register_forward_pre_hook(lambda _, given: rows.append(given[0].shape[:-1].numel()))
    monkeypatch.setattr(numerics, "LATER", 1)
    found = numerics.numerics(engine, moved=False)
    # In part: the recorded step and a later one; whole: gradients, evaluations, training.
    assert Counter(rows)[48] == 2
    assert Counter(rows)[96] == 4
    assert {(each["layer"], each["role"]) for each in found["products"]} == {
        (name, role) for name in engine.conversion.converted for role in (FPROP, DGRAD, WGRAD)
    }
    assert found["gradients"]["data"] == fingerprint(engine.training_batch(0, 0))


def test_a_role_is_told_by_sizes_in_every_model_of_the_suite():
    """And a block of 128 scaled values is whole."""
    features = {size for s in SHAPES.values() for size in (s.hidden, s.intermediate, s.vocab)}
    features |= {n * (s.head_dim or s.hidden // s.heads) for s in SHAPES.values() for n in (s.heads, s.kv_heads)}
    assert recorded.TOKENS not in features
    assert recorded.TOKENS % 128 == 0


# -- gradients, and what moves them -----------------------------------------------------------------------------------


def test_gradients_repeat_and_moved_weights_give_others():
    server = serve()
    model = server.engine.model
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    one, both = server.numerics(moved=False)["gradients"], server.numerics(moved=True)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    found = [np.frombuffer(b64decode(g["sketches"]["0.weight"]), dtype=np.float32) for g in (one, both["moved"])]
    assert 0.001 < np.linalg.norm(found[1] - found[0]) / np.linalg.norm(found[0]) < 0.3
    assert one == both["gradients"] == server.numerics(moved=False)["gradients"]
    assert all(type(p) is nn.Parameter and torch.equal(before[n], p) for n, p in model.named_parameters())
    assert hooks == [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    draws = server.moved("gradients", draws=2)
    assert len({draw["sketches"]["0.weight"] for draw in [both["moved"], *draws]}) == 3
    assert server.moved("gradients", draws=2) == draws


def test_a_sketch_keeps_lengths_and_angles():
    places = rotated(torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    one, two = (torch.randn(300, 500, generator=generator) for _ in range(2))
    assert float(sketch(one, 1, places) @ sketch(two, 1, places)) / (300 * 500) == pytest.approx(0, abs=0.1)
    both = sketch(one, 1, places) + sketch(two, 1, places)
    torch.testing.assert_close(sketch(one + two, 1, places), both, atol=1e-3, rtol=1e-3)
    few, flat = torch.zeros(2048, 1024), torch.ones(2048, 1024)
    few[:, 7] = 1.0
    for tensor in (one, few, flat):
        assert float(sketch(tensor, 1, places).norm() / tensor.norm()) == pytest.approx(1, abs=0.1)


def mixture():
    """How many rows an expert gets is what a router makes of them, also where they are computed again."""

    def routed(model, x):
        chosen, out = model.router(x).argmax(-1), torch.zeros_like(x)
        for index, expert in enumerate(model.experts):
            rows = (chosen == index).nonzero().flatten()
            out = out.index_add(0, rows, expert(x[rows]).relu())
        return out

    def forward(model, x):
        return checkpoint(lambda x: routed(model, x), x, use_reentrant=False)

    return net(forward, router=(32, 4), experts=nn.ModuleList(nn.Linear(32, 32) for _ in range(4)))


def test_operands_are_moved_value_by_value_beside_recomputation_and_keep_no_factors():
    reference = TENSORWISE.reference()
    server = serve(reference, build=mixture, batch=lambda step: torch.randn(256, 32))
    found = server.moved("gradients", draws=0, operands=4)
    assert len({each["loss"] for each in found}) == 4
    server = serve(reference, build=lambda: nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)))
    engine, types = server.engine, []
    kept = torch.autograd.graph.saved_tensors_hooks(lambda one: types.append(one.dtype) or one, lambda one: one)
    with moved_operands(engine, seed=0), kept:
        engine.model(engine.training_batch(seed=0, step=0))
    assert {*types} == {torch.bfloat16}


def test_ways_that_do_not_fit_the_memory_uncompiled_are_left_out():
    def short_of_memory(model, x):
        if model._forward_hooks:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return square(model, x)

    server = serve(TENSORWISE.reference(), build=lambda: nn.Linear(32, 32), loss=short_of_memory)
    assert len(server.moved("gradients", draws=2, operands=4)) == 2


# -- what the optimizer is given --------------------------------------------------------------------------------------


CLIPPED = {"loss": None, "step": loop(2, clip=0.01), "batch": batch}


@pytest.mark.parametrize("given", [{}, CLIPPED], ids=["loss", "clipped"])
def test_an_arm_notes_what_its_optimizer_is_given(given):
    server = serve(**given)
    noted = server.numerics(moved=False)
    for key in ("handed_on", "handed_on_later"):
        assert [each["layer"] for each in noted[key]] == ["2", "0"]
        assert all(each["cosine"] > 0.999 for each in noted[key])
        first, second = (each["factor"] for each in noted[key])
        assert first == pytest.approx(second, rel=0.01), "one factor for all layers"
        assert first < 0.5 if given else abs(first - 1) < 0.01
    assert "step" not in vars(server.engine.optimizer), "nothing is left of the watch"


def test_a_step_with_a_closure_notes_nothing():
    noted = serve(optimizer=lbfgs, loss=None, step=closing()).numerics(moved=False)
    assert noted["handed_on"] == noted["handed_on_later"] == []
    assert noted["products"]


# -- scales that are known before their operands: delayed scaling -----------------------------------------------------

FORWARD, BACKWARD = "scaling_fwd", "scaling_bwd"


def cast(given, state, index):
    """The values as FP8 holds them with the scale of ``index``, which saturates; their amax joins the history."""
    dtype = torch.float8_e4m3fn if state.largest == 448 else torch.float8_e5m2
    state.amax_history[0, index] = given.abs().max()
    return (given * state.scale[index]).clamp(-state.largest, state.largest).to(dtype).float() / state.scale[index]


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, meta):
        x, weight = cast(x, meta[FORWARD], 0), cast(weight, meta[FORWARD], 1)
        ctx.save_for_backward(x, weight)
        ctx.meta = meta
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        gradient = cast(gradient, ctx.meta[BACKWARD], 0)
        return gradient @ weight, gradient.t() @ x, None


def state(scale, largest):
    return SimpleNamespace(scale=torch.tensor(scale), amax_history=torch.zeros(2, len(scale)), largest=largest)


def renew(layer):
    """What Transformer Engine does after a pass: the scales of the next one."""
    for each in layer.fp8_meta.values():
        known = each.amax_history[0] > 0
        each.scale[known] = each.largest / each.amax_history[0][known]


def delayed(layer):
    layer.fp8_meta = {FORWARD: state([1.0, 1.0], 448.0), BACKWARD: state([1.0], 57344.0)}
    layer.reset_fp8_meta_tensors = lambda: None
    layer.forward = lambda x: Product.apply(x, layer.weight, layer.fp8_meta) + layer.bias
    return layer


def serve_delayed(misfit=None, **workload):
    """An arm whose layers scale by what the last pass saw; ``misfit``: an operand's name and a factor of its scale."""
    engine = (server := serve(**workload)).engine
    backend = engine.backend
    layers = [delayed(layer) for layer in engine.model.modules() if backend.is_fp8_layer(layer)]
    backend.scaling = lambda layer: TransformerEngine.scaling(backend, layer)
    engine.calibration_passes = 2
    step, places = engine.step, {INPUT: (FORWARD, 0), WEIGHT: (FORWARD, 1), GRADIENT: (BACKWARD, 0)}

    def stepped(*args, **kwargs):
        loss = step(*args, **kwargs)
        for layer in layers:
            renew(layer)
            if misfit is not None:
                name, index = places[misfit[0]]
                layer.fp8_meta[name].scale[index] *= misfit[1]
        return loss

    engine.step = stepped
    return server


def test_scales_are_fitted_to_a_batch_with_larger_gradients_through_all_layers():
    def build():
        return torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))

    def batch(step):
        # Those that restart() calibrates with have gradients of a 64th.
        return torch.randn(32, 64), 1.0 if step < 1_000_000 else 1 / 64

    def loss(model, batch):
        x, size = batch
        return size * model(x).square().mean()

    found = serve_delayed(build=build, batch=batch, loss=loss).numerics(moved=False)["products"]
    assert len(found) == 8 * 3 - 1
    assert max(map(abs, off(found))) < 1


@pytest.mark.parametrize(("operand", "factor"), [(INPUT, 2.0), (WEIGHT, 1 / 64), (GRADIENT, 2.0)])
def test_a_scale_of_past_steps_may_saturate_a_little_or_leave_room(operand, factor):
    found = serve_delayed((operand, factor)).numerics(moved=False)
    for products in (found["products"], found["later"]):
        assert {p["role"] for p in products} == {FPROP, DGRAD, WGRAD}
        assert max(map(abs, off(products))) < 0.5


@pytest.mark.parametrize(("operand", "role"), [(INPUT, FPROP), (WEIGHT, FPROP), (GRADIENT, DGRAD), (INPUT, WGRAD)])
def test_a_scale_for_an_operand_sixteen_times_as_small_does_not_fit(operand, role):
    assert max(off(products(serve_delayed((operand, 16.0))), role)) > 1


def test_a_recomputation_is_compared_with_the_scales_of_its_first_pass():
    server = serve_delayed(build=recomputed)
    layers = [layer for layer in server.engine.model.modules() if hasattr(layer, "fp8_meta")]
    for layer in layers:
        first = []

        def forward(x, own=layer, first=first):
            meta = own.fp8_meta
            if torch._C._current_graph_task_id() == -1:
                first[:] = meta[FORWARD].scale.tolist()
            else:
                # Transformer Engine's recomputation uses the first pass's scales again, which it had put aside.
                meta = {**meta, FORWARD: SimpleNamespace(**vars(meta[FORWARD]))}
                meta[FORWARD].scale = torch.tensor(first)
            return Product.apply(x, own.weight, meta) + own.bias

        layer.forward = forward

    def moved_on(*_):
        for layer in layers:
            layer.fp8_meta[FORWARD].scale *= 3

    server.engine.model.register_forward_hook(moved_on)
    found = products(server)
    assert off(found, RECOMPUTE)
    assert max(map(abs, off(found))) < 0.5


def own_delayed(stuck):
    """An arm with torchao's layers under a class of the user's own, which keeps its scales in buffers that nobody
    tells; ``stuck``: never renewed."""
    from torchao.float8.float8_linear import Float8Linear

    def forward(self, x):
        if not stuck:
            renew(self)
        return Product.apply(x, self.weight, self.fp8_meta) + self.bias

    kind = type("Delayed", (Float8Linear,), {"forward": forward, "__module__": __name__})
    server = serve()
    for layer in server.engine.model.modules():
        if server.engine.backend.is_fp8_layer(layer):
            layer.fp8_meta = {FORWARD: state([1.0, 1.0], 448.0), BACKWARD: state([1.0], 57344.0)}
            layer.register_buffer("forward_scales", layer.fp8_meta[FORWARD].scale)
            layer.register_buffer("gradient_scale", layer.fp8_meta[BACKWARD].scale)
            layer.__class__ = kind
    return server


def test_a_layer_that_renews_scales_of_its_own_is_known_and_its_first_scales_fit():
    found = own_delayed(stuck=False).numerics(moved=False)
    products = found["products"] + found["later"]
    # Another question may have asked for the same step before: scales then stand still in it, and the later one tells.
    assert {p["layer"] for p in products if p["own_scales"]} == {p["layer"] for p in products}
    assert max(off(found["products"], DGRAD)) < LATER_DELAYED.sqnr_db
    found = own_delayed(stuck=True).numerics(moved=False)
    assert {p["own_scales"] for p in found["products"] + found["later"]} == {False}
