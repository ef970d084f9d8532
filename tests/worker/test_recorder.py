"""One recorded step as a table: owner, phase and role of each product, what each call owes; and a model as it is built:
what its Linears do besides their product, and the hash of what its first step executes."""

from __future__ import annotations

import pytest

pytest.importorskip("torchao")
import functools
import sys
import types
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from helpers.nets import net
from pytest_fp8 import Case, Workload
from pytest_fp8.arms.spec import ArmSpec
from pytest_fp8.questions.layers.products import FP8
from pytest_fp8.worker.as_built import VARY, dropped_behaviour, with_behaviour
from pytest_fp8.worker.as_built import executed as executed_by
from pytest_fp8.worker.record.operators import products_of_call
from pytest_fp8.worker.record.recorder import StepRecorder
from pytest_fp8.worker.record.tables import layer_table, products_of
from pytest_fp8.worker.run.engine import Engine

pytestmark = pytest.mark.slow


def record(model, loss, sizes):
    recorder = StepRecorder(model, linears=sizes)
    with recorder.watching():
        with recorder.in_phase("forward"):
            value = loss()
        with recorder.in_phase("backward"):
            value.backward()
    return recorder.table


class Gemm(torch.autograd.Function):
    """A product as Transformer Engine computes it: all three by its own function."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return sys.modules["transformer_engine.pytorch.module"].general_gemm(weight, x, layout="TN")

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        multiply = sys.modules["transformer_engine.pytorch.module"].general_gemm
        return multiply(weight, gradient, layout="NN"), multiply(x, gradient, layout="NT")


class OfTransformerEngine(torch.nn.Linear):
    def forward(self, x):
        return Gemm.apply(x, self.weight)


@pytest.fixture
def library(monkeypatch):
    def general_gemm(a, b, *, layout):
        with torch._C._DisableTorchDispatch():
            return {"TN": lambda: b @ a.t(), "NN": lambda: b @ a, "NT": lambda: b.t() @ a}[layout]()

    module = types.ModuleType("transformer_engine.pytorch.module")
    module.general_gemm = general_gemm
    monkeypatch.setitem(sys.modules, module.__name__, module)


def test_a_librarys_own_products_are_their_layers_in_each_role(library):
    model = torch.nn.Sequential(OfTransformerEngine(32, 48, bias=False), OfTransformerEngine(48, 16, bias=False))
    sizes = {"0": (32, 48), "1": (48, 16)}
    table = record(model, lambda: model(torch.randn(64, 32)).sum(), sizes)
    found = layer_table(table, sizes)
    assert {call.name: {role: p.operator for role, p in call.ran.items()} for call in found.calls} == {
        "0": {"fprop": "te.TN", "wgrad": "te.NT"},
        "1": {"fprop": "te.TN", "dgrad": "te.NN", "wgrad": "te.NT"},
    }
    # The first layer's input needs no gradient, and the function computes it all the same.
    assert [product.operator for product in found.others] == ["te.NN"]
    assert not found.foreign


def test_a_product_belongs_to_the_module_that_made_its_node():
    """Also in the backward pass, where no module is called."""

    scored = net(lambda model, x: x @ model.weight, weight=torch.nn.Parameter(torch.randn(8, 4)))
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), scored)
    table = record(model, lambda: model(torch.randn(16, 8)).sum(), {"0": (8, 8)})
    owners = [(owned.owner, owned.product.phase) for owned in products_of(table)]
    assert sorted(owners) == [
        ("0", "backward"),
        ("0", "forward"),
        ("1", "backward"),
        ("1", "backward"),
        ("1", "forward"),
    ]


def test_products_are_known_by_their_operands_whatever_the_operator_is_called():
    def fp8(*shape):
        return torch.empty(shape, dtype=torch.float8_e4m3fn, device="meta")

    def made(*shape):
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    # A library's own kernel, whose right operand is a weight as it is stored.
    [product] = products_of_call("forward", "mine::gemm_nt", (fp8(96, 64), None, fp8(32, 64), None), made(96, 32))
    assert (product.kind, product.extents) == (FP8, ("forward", 64, (32, 96)))
    # The experts of a mixture, all rows in one product. It runs on a GPU alone.
    [product] = products_of_call(
        "forward", "_scaled_grouped_mm", (fp8(96, 64), fp8(4, 64, 32), None, None), made(96, 32)
    )
    assert (product.kind, product.extents) == (FP8, ("forward", 64, (32, 96)))
    for operator, args, result in (
        ("mine::cast", (fp8(96, 64), fp8(96, 64)), fp8(96, 64)),
        ("eq", (fp8(64, 64), fp8(64, 64)), torch.empty(64, 64, dtype=torch.bool, device="meta")),
        ("mine::weight_only", (made(96, 64), fp8(32, 64)), made(96, 32)),
    ):
        assert not products_of_call("forward", operator, args, result)


def pair():
    return torch.nn.ModuleDict({"a": torch.nn.Linear(8, 8), "b": torch.nn.Linear(8, 8)})


def watched(model, loss):
    """Name -> (dgrad, wgrad) owed by each call, in order. What is owed ran."""
    layers = {name: (8, 8) for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    found = layer_table(record(model, loss, layers), layers)
    assert not found.others
    # A recomputation ends as soon as it has what the backward pass needs.
    assert all({*call.owed} - {*call.ran} <= {"recompute"} for call in found.calls)
    return [(call.name, "dgrad" in call.owed, "wgrad" in call.owed) for call in found.calls]


def detached(model):
    return model["b"](model["a"](X).detach()).sum()


def called_twice(model):
    hidden = model["a"](X)
    return model["b"](hidden).sum() + model["b"](hidden.detach() + 1).detach().sum()


def changed_in_a_view(model):
    """Three dimensions with a bias: the output is a view, whose own node the backward pass goes past."""
    hidden = model["a"](X.view(2, 2, 8))
    hidden[..., :2] *= 2
    return model["b"](hidden).sum()


def no_tensor(model):
    model["a"].register_forward_hook(lambda module, given, output: {"out": output})
    return model["a"](X)["out"].sum()


X = torch.randn(4, 8)


@pytest.mark.parametrize(
    ("loss", "owed"),
    [
        (detached, [("a", False, False), ("b", False, True)]),
        (called_twice, [("a", False, True), ("b", True, True), ("b", False, False)]),
        (changed_in_a_view, [("a", False, True), ("b", True, True)]),
        (no_tensor, [("a", False, True)]),
    ],
)
def test_a_call_owes_gradients_where_the_backward_pass_reaches_it(loss, owed):
    model = pair()
    assert watched(model, lambda: loss(model)) == owed


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kept", [False, True], ids=["detached", "reached"])
def test_recomputed_calls_are_told_apart(reentrant, kept):
    model, x = pair(), X.clone().requires_grad_()

    def loss():
        hidden = checkpoint(model["a"], x, use_reentrant=reentrant)
        return model["b"](hidden if kept else hidden.detach()).sum()

    seen = {name: gradients for name, *gradients in watched(model, loss)}
    assert seen["b"] == [kept, True]
    # A first pass without gradients that is never repeated is no call that trains.
    assert seen.get("a", [False, False]) == [kept, kept]


# -- what a Linear does besides its product ---------------------------------------------------------------------------


class Casts(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))


class Scales(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


class Reverses(nn.Linear):
    def forward(self, x):
        class Turned(torch.autograd.Function):
            @staticmethod
            def forward(ctx, value):
                return value.view_as(value)

            @staticmethod
            def backward(ctx, gradient):
                return -gradient

        return Turned.apply(super().forward(x))


def with_pre_hook(*sizes):
    layer = nn.Linear(*sizes)
    layer.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    return layer


def with_own_forward(*sizes):
    layer = nn.Linear(*sizes)
    layer.forward = lambda x: nn.Linear.forward(layer, 2 * x)
    return layer


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (Scales, "the forward of Scales"),
        (Reverses, "the forward of Reverses"),
        (with_pre_hook, "a forward pre-hook"),
        (with_own_forward, "a forward of its own"),
    ],
)
def test_a_forward_that_does_more_is_named(kind, what):
    layer = kind(16, 16).to(torch.bfloat16)
    before = dict(vars(layer))
    plain = nn.Sequential(nn.Linear(16, 16))
    assert dropped_behaviour(with_behaviour(nn.Sequential(layer)), plain, ["0"]) == {"0": what}
    assert vars(layer) == before


@pytest.mark.parametrize("trained", [True, False])
def test_a_forward_that_casts_alone_is_a_product(trained):
    assert not with_behaviour(nn.Sequential(Casts(16, 16).to(torch.bfloat16).requires_grad_(trained)))


# -- what the first step executes: the hash of an own model's case -----------------------------------------------------

CASE = Case("own", "torchao", "tensorwise", emulated=True, steps=4)


def build(width=64, kind="Linear", frozen=False, bypass=False, routed=False):
    """A small model. Its options change one thing each that a first step executes."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up = type(kind, (torch.nn.Linear,), {})(32, width)
            self.down = torch.nn.Linear(width, 16)
            self.norm = torch.nn.BatchNorm1d(16)
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            linear = torch.nn.functional.linear
            h = linear(x, self.up.weight, self.up.bias) if bypass else self.up(x)
            h = h[h.mean(1) > 0] if routed else h
            return self.norm(self.down(h) * self.calls)

    model = Model()
    model.up.weight.requires_grad_(not frozen)
    return model


def batch(step, rows=16):
    return torch.randn(rows, 32)


def loss(model, x):
    return model(x).float().square().mean()


def twice(model, x):
    return model(x).float().square().mean() + model(x).float().mean()


def step(model, x, optimizer, precision):
    """A hand-written step whose state, how often it was called, decides what it trains on."""
    optimizer.calls = getattr(optimizer, "calls", 0) + 1
    for part in x.chunk(2):
        loss(model, part * optimizer.calls).backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss(model, x).detach()


def reference(case=CASE, **changes):
    workload = Workload(**{"build": build, "batch": batch, "loss": loss, **changes})
    return ArmSpec(case.reference(), "cpu", workload.ship("a test"), threads=1)


def first_step(spec):
    return Engine(spec).first_step


def executed(spec):
    return executed_by(Engine(spec))


HEALTHY = first_step(reference())


# -- what the first step executes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"build": functools.partial(build, width=128)},
        {"build": functools.partial(build, kind="Other")},
        {"build": functools.partial(build, frozen=True)},
        {"build": functools.partial(build, bypass=True)},
        {"batch": functools.partial(batch, rows=32)},
        {"batch": lambda step: {"x": batch(step)}, "loss": lambda model, x: loss(model, x["x"])},
        {"loss": twice},
        {"step": step},
    ],
    ids=["width", "module class", "frozen", "product", "rows", "batch", "calls", "micro-batches"],
)
def test_what_is_executed_changes_the_hash(changes):
    changed = first_step(reference(**changes))
    assert changed == first_step(reference(**changes)) != HEALTHY


def test_rows_that_follow_from_the_numbers_do_not_count():
    assert executed(reference(build=functools.partial(build, routed=True)))["calls"] == VARY
    assert executed(reference())["calls"] == [
        ["up", True, [[[16, 32], "torch.bfloat16"]]],
        ["down", True, [[[16, 64], "torch.bfloat16"]]],
    ]


def test_evaluation_and_recomputation_are_no_calls_of_a_step():
    def evaluating(model, x, optimizer, precision):
        with torch.no_grad():
            model(x)
        checkpoint(model, x, use_reentrant=False).float().mean().backward()
        optimizer.step()
        return x.new_zeros(())

    assert [name for name, *_ in executed(reference(step=evaluating))["calls"]] == ["up", "down"]


def test_an_fp8_arm_and_a_model_of_ours_tell_none():
    assert first_step(replace(reference(), case=CASE)) == ""
    assert first_step(ArmSpec(Case("micro", "bf16", "none", emulated=True), "cpu")) == ""
