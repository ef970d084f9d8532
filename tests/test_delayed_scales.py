"""Products of layers that knew their scales before their operands: delayed scaling, emulated on the CPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from helpers.arms import spec
from pytest_fp8 import Case
from pytest_fp8.backends.transformer_engine import TransformerEngine
from pytest_fp8.casts import E4M3, E5M2, GRADIENT, INPUT, TENSOR, WEIGHT, Cast
from pytest_fp8.questions.numerics.limits import LATER_DELAYED
from pytest_fp8.recipes import DGRAD, FPROP, RECOMPUTE, WGRAD
from pytest_fp8.worker.record.accuracy import FORMATS, Operand
from pytest_fp8.worker.server import ArmServer

pytestmark = pytest.mark.slow

FORWARD, BACKWARD = "scaling_fwd", "scaling_bwd"


def cast(values, state, index):
    """The values as FP8 holds them with the scale of ``index``, which saturates; their amax joins the history."""
    dtype = torch.float8_e4m3fn if state.largest == 448 else torch.float8_e5m2
    state.amax_history[0, index] = values.abs().max()
    return (values * state.scale[index]).clamp(-state.largest, state.largest).to(dtype).float() / state.scale[index]


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


def renew(layers):
    """What Transformer Engine does after a pass: the scales of the next one."""
    for layer in layers:
        for each in layer.fp8_meta.values():
            known = each.amax_history[0] > 0
            each.scale[known] = each.largest / each.amax_history[0][known]


def serve(misfit=None, **workload):
    """An arm whose layers scale by what the last pass saw; ``misfit``: an operand's name and a factor of its scale."""
    server = ArmServer(spec(Case("own", "torchao", "tensorwise", emulated=True), **workload))
    backend, layers = server.engine.backend, []
    for layer in server.engine.model.modules():
        if not backend.is_fp8_layer(layer):
            continue
        layer.fp8_meta = {FORWARD: state([1.0, 1.0], 448.0), BACKWARD: state([1.0], 57344.0)}
        layer.reset_fp8_meta_tensors = lambda: None
        layer.forward = lambda x, own=layer: Product.apply(x, own.weight, own.fp8_meta) + own.bias
        layers.append(layer)
    backend.scaling = lambda layer: TransformerEngine.scaling(backend, layer)
    server.engine.calibration_passes = 2
    step, places = server.engine.step, {INPUT: (FORWARD, 0), WEIGHT: (FORWARD, 1), GRADIENT: (BACKWARD, 0)}

    def stepped(*args, **kwargs):
        loss = step(*args, **kwargs)
        renew(layers)
        if misfit is not None:
            name, index = places[misfit[0]]
            for layer in layers:
                layer.fp8_meta[name].scale[index] *= misfit[1]
        return loss

    server.engine.step = stepped
    return server


def distances(products, role):
    return [p["own_sqnr"] - p["sqnr"] for p in products if p["role"] == role and p["power"]]


@pytest.mark.parametrize(("operand", "factor"), [(INPUT, 2.0), (WEIGHT, 1 / 64), (GRADIENT, 2.0)])
def test_a_scale_of_past_steps_may_saturate_a_little_or_leave_room(operand, factor):
    found = serve((operand, factor)).numerics(moved=False)
    for products in (found["products"], found["later"]):
        assert {role for role in (FPROP, DGRAD, WGRAD) if distances(products, role)} == {FPROP, DGRAD, WGRAD}
        assert all(abs(far) < 0.5 for role in (FPROP, DGRAD, WGRAD) for far in distances(products, role))


@pytest.mark.parametrize(("operand", "role"), [(INPUT, FPROP), (WEIGHT, FPROP), (GRADIENT, DGRAD), (INPUT, WGRAD)])
def test_a_scale_for_an_operand_sixteen_times_as_small_does_not_fit(operand, role):
    products = serve((operand, 16.0)).numerics(moved=False)["products"]
    assert max(distances(products, role)) > 1


@pytest.mark.parametrize(
    ("form", "unused", "believed"),
    [(E4M3, 128, True), (E4M3, 512, False), (E5M2, 8500, True), (E5M2, 1e5, True), (E5M2, 1e6, False)],
)
def test_a_scale_may_leave_as_much_unused_as_its_format_can_spare(form, unused, believed):
    """Gradients fall to a thousandth of what a history of their first steps makes scales for."""
    lines = torch.randn(64, 256)
    dtype = FORMATS[form]
    scale = torch.finfo(dtype).max / lines.abs().max() / unused
    values, _ = Operand(lines, lines.abs().max(), scale=scale).cast(Cast(form, TENSOR))
    by_hand = (lines * scale).to(dtype).float() / scale
    assert torch.equal(values, by_hand) is believed
    assert torch.nn.functional.cosine_similarity(values.flatten(), lines.flatten(), dim=0) > 0.99


class Recomputed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.leave = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)

    def forward(self, x):
        def block(x):
            return self.leave(torch.relu(self.enter(x)))

        return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)


def test_a_recomputation_is_compared_with_the_scales_of_its_first_pass():
    server = serve(build=Recomputed)
    for layer in (server.engine.model.enter, server.engine.model.leave):
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

    def moved_on(model, *_):
        for layer in (model.enter, model.leave):
            layer.fp8_meta[FORWARD].scale *= 3

    server.engine.model.register_forward_hook(moved_on)
    products = server.numerics(moved=False)["products"]
    assert len(distances(products, RECOMPUTE)) >= 1
    assert all(abs(far) < 0.5 for role in (FPROP, RECOMPUTE, DGRAD, WGRAD) for far in distances(products, role))


class OwnDelayed(torch.nn.Module):
    """What a user writes: scales in buffers, each of the pass before."""

    def renewed(self):
        for name, each in (("forward_scales", self.fp8_meta[FORWARD]), ("gradient_scale", self.fp8_meta[BACKWARD])):
            known = each.amax_history[0] > 0
            self.get_buffer(name)[known] = each.largest / each.amax_history[0][known]


def own_delayed(stuck=False):
    """An arm with torchao's layers under a class of the user's own, whose scales nobody tells."""
    from torchao.float8.float8_linear import Float8Linear

    def forward(self, x):
        if not stuck:
            self.renewed()
        return Product.apply(x, self.weight, self.fp8_meta) + self.bias

    kind = type("Delayed", (OwnDelayed, Float8Linear), {"forward": forward, "__module__": __name__})
    server = ArmServer(spec(Case("own", "torchao", "tensorwise", emulated=True)))
    for layer in server.engine.model.modules():
        if server.engine.backend.is_fp8_layer(layer):
            layer.fp8_meta = {FORWARD: state([1.0, 1.0], 448.0), BACKWARD: state([1.0], 57344.0)}
            layer.register_buffer("forward_scales", layer.fp8_meta[FORWARD].scale)
            layer.register_buffer("gradient_scale", layer.fp8_meta[BACKWARD].scale)
            layer.__class__ = kind
    return server


def test_a_layer_that_renews_scales_of_its_own_is_known_and_its_first_scales_fit():
    found = own_delayed().numerics(moved=False)
    products = found["products"] + found["later"]
    # Another question may have asked for the same step before: scales then stand still in it, and the later one tells.
    assert {p["layer"] for p in products if p["own_scales"]} == {p["layer"] for p in products}
    assert max(distances(found["products"], DGRAD)) < LATER_DELAYED.sqnr_db


def test_a_layer_whose_scales_stand_still_has_none_of_its_own():
    found = own_delayed(stuck=True).numerics(moved=False)
    assert {p["own_scales"] for p in found["products"] + found["later"]} == {False}
