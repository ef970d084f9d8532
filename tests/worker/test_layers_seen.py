"""What the layers question and the ledgers see of live arms: sound ways to train, and faults with the code of each.

Every other sound workload: ``python -m benchmarks.healthy``; every other fault: ``suites/controls/arms.py``."""

from __future__ import annotations

import pytest

pytest.importorskip("torchao")
import functools
import random
import threading
import time
from dataclasses import replace
from functools import partial

import torch
from torch import nn
from torch.nn import Linear, functional
from torch.utils.checkpoint import checkpoint

from benchmarks.healthy.own_fp8 import Product, to_fp8, with_wrapped_weights
from helpers.evidence import verdict_of
from helpers.nets import (
    CASE,
    OwnLinear,
    build,
    by_torchao,
    closing,
    judge,
    judge_both,
    lbfgs,
    ledgers,
    loop,
    net,
    routed,
    sam,
    serve,
    squares,
    with_own_layers,
)
from pytest_fp8 import Verdict
from pytest_fp8.codes import L
from pytest_fp8.questions.ledger.compare import compare
from pytest_fp8.worker.training.setup import takes_model

pytestmark = pytest.mark.slow

ACCELERATE = replace(CASE, backend="accelerate_torchao")


# -- FP8 of one's own -------------------------------------------------------------------------------------------------


class ForwardAlone(Product):
    """The gradients stay in BF16."""

    @staticmethod
    def forward(ctx, x, weight):
        out = Product.forward(ctx, x, weight)
        ctx.save_for_backward(x, weight)
        return out

    @staticmethod
    def backward(ctx, given):
        x, weight = ctx.saved_tensors
        return given @ weight, given.t() @ x


class OfStoredWeight(nn.Module):
    """For inference: its weight is a frozen tensor of an FP8 type, with a scale beside it."""

    def __init__(self, old):
        super().__init__()
        stored, self.scale = to_fp8(old.weight.detach(), torch.float8_e4m3fn)
        self.weight, self.bias = nn.Parameter(stored, requires_grad=False), old.bias

    def forward(self, x):
        return ForwardAlone.apply(x, (self.weight.float() * self.scale).to(x.dtype)) + self.bias


def with_function_in_blocks(function=Product):
    """A conversion after which blocks multiply with their Linears' weights themselves."""

    def convert(model):
        def forward(block, x):
            hidden = functional.gelu(function.apply(x, block.up.weight) + block.up.bias)
            return x + function.apply(hidden, block.down.weight) + block.down.bias

        for block in model.blocks:
            block.forward = forward.__get__(block)
        return with_own_layers("enter")(model)

    return convert


WEIGHTS = with_wrapped_weights(float8_linear_recipe="tensorwise")
FORWARD_ALONE = with_function_in_blocks(ForwardAlone)


class Unwrapped(torch.autograd.Function):
    """Multiplies in BF16 with a weight that would multiply in FP8."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return x @ weight._data.t() + bias._data

    @staticmethod
    def backward(ctx, given):
        x, weight = ctx.saved_tensors
        return given @ weight._data, given.t() @ x, given.sum(0)


def past_its_wrapper(model):
    """One layer multiplies with what its weight's wrapper holds."""
    layer = WEIGHTS(model).get_submodule("blocks.0.up")
    layer.forward = lambda x: Unwrapped.apply(x, layer.weight, layer.bias)
    return model


class Raw(nn.Module):
    """Two products of parameters that no Linear holds, around one Linear."""

    def __init__(self):
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(o, i) / 8) for i, o in ((32, 256), (256, 32)))
        self.out = Linear(32, 32)

    def forward(self, x):
        return self.out(functional.gelu(x @ self.up.t()) @ self.down.t())


# -- sound ways to train ----------------------------------------------------------------------------------------------


SIZES = {"up": (32, 64), "down": (64, 32)}


def direct(kept=False):
    """Calls ``layer.forward(x)``, which runs none of torch's hooks; ``kept``: of the layers before the conversion."""

    def forward(model, x):
        up, down = model.kept or (model.up, model.down)
        return down.forward(functional.gelu(up.forward(x)))

    model = net(forward, **SIZES)
    model.kept = [model.up, model.down] if kept else None
    return model


def compiled():
    """A piece of it is compiled in one piece."""
    model = net(lambda model, x: model.act(x), enter=(32, 32))
    model.act = torch.compile(lambda x: model.enter(x).relu() * 2, fullgraph=True, backend="eager")
    return model


def target_of_itself(model, x):
    with torch.no_grad():
        target = model(x)
    return (model(x) - target.flip(0)).float().square().mean()


def whole_recomputed(model, batch, optimizer, precision):
    loss = checkpoint(model, batch.requires_grad_(), use_reentrant=True).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        model(batch[:16])
    return loss


SOUND = {
    # name: (parts of the workload, products that each role owes)
    "micro-batches, clipped": ({"step": loop(3, clip=1.0)}, {"fprop": 15, "dgrad": 12, "wgrad": 15}),
    "evaluated between steps": ({"step": loop(2, evaluate=True)}, {"fprop": 10}),
    "a closure, called twice": ({"optimizer": lbfgs, "step": closing(keyword=True)}, {"fprop": 10, "wgrad": 10}),
    "sharpness-aware": ({"optimizer": sam, "step": closing()}, {"fprop": 10, "wgrad": 10}),
    "recomputed": ({"build": partial(build, True), "step": loop(2)}, {"fprop": 10, "recompute": 8}),
    "recomputed reentrantly": ({"build": partial(build, True, True), "step": loop(2)}, {"fprop": 10, "recompute": 8}),
    "evaluated in the loss": ({"build": partial(build, True, True), "loss": target_of_itself}, {"recompute": 4}),
    "recomputed whole": ({"step": whole_recomputed}, {"fprop": 5, "recompute": 5}),
    "called directly": ({"build": direct, "step": loop(2)}, {"fprop": 4, "wgrad": 4}),
    "called by keyword": (
        {"build": partial(net, lambda model, x: model.down(input=model.up(input=x).relu()), **SIZES)},
        {"fprop": 2, "wgrad": 2},
    ),
    "compiled by build()": ({"build": lambda: torch.compile(build(), backend="eager")}, {"fprop": 5}),
    "compiled in a piece": ({"build": compiled}, {"fprop": 1}),
    "left by a pattern": ({"convert": by_torchao(but=["blocks.1.down"]), "leave": ("*.1.down",)}, {"fprop": 4}),
    "through Accelerate": ({"case": ACCELERATE, "step": loop(2)}, {"fprop": 6}),
    "FP8 layers of one's own": ({"convert": with_own_layers()}, {"fprop": 5, "dgrad": 4, "wgrad": 5}),
    "FP8 of a function, recomputed": (
        {"build": partial(build, True), "convert": with_function_in_blocks()},
        {"fprop": 5, "recompute": 4},
    ),
    "torchao's weights": (
        {"convert": WEIGHTS},
        {"fprop": 5, "dgrad": 4, "wgrad": 5},
    ),
}


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_way_passes_and_each_product_that_is_owed_is_found(name):
    parts, owed = SOUND[name]
    decision = judge(serve(**parts), parts.get("case", CASE))
    assert decision.verdict is Verdict.PASS, decision.message
    roles = decision.figures.roles
    assert {role: roles[role]["expected"] for role in owed} == owed
    # torch ends a recomputation before its last product where it can.
    assert all(each["fp8"] == each["expected"] for role, each in roles.items() if role != "recompute")
    assert "recompute" not in roles or roles["recompute"]["fp8"] >= roles["recompute"]["expected"] / 2


@pytest.mark.parametrize("case", [replace(CASE, autocast=True), replace(CASE, autocast=True).reference()], ids=str)
@pytest.mark.parametrize("step", [None, loop()], ids=["loss", "step"])
def test_under_autocast_a_users_float32_stays_and_products_are_of_bfloat16(case, step):
    """torchao's layer asks for the autocast of a GPU, on a CPU too."""

    def loss(model, rows):
        output = model(rows)
        assert (rows.dtype, output.dtype) == (torch.float32, torch.bfloat16)
        return output.float().square().mean()

    engine = serve(case, **({"step": step} if step else {"loss": loss})).engine
    assert {parameter.dtype for parameter in engine.model.parameters()} == {torch.float32}
    assert {value.dtype for state in engine.optimizer.state.values() for value in state.values()} == {torch.float32}
    assert not torch.is_autocast_enabled("cuda")
    assert not torch.is_autocast_enabled("cpu")


# -- faults -----------------------------------------------------------------------------------------------------------


class ByHand(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        x = x.to(torch.bfloat16)
        ctx.save_for_backward(x, weight)
        return x @ weight.t().to(torch.bfloat16)

    @staticmethod
    def backward(ctx, given):
        x, weight = ctx.saved_tensors
        return given @ weight.to(given.dtype), given.t() @ x.to(given.dtype)


PAST = {
    "a function": lambda x, layer: functional.linear(x, layer.weight, layer.bias),
    "halves": lambda x, layer: torch.cat([x @ half.t() for half in layer.weight.chunk(2)], -1),
    "batches": lambda x, layer: torch.bmm(x.view(2, -1, 32), layer.weight.t().expand(2, -1, -1)).flatten(0, 1),
    "a clone": lambda x, layer: functional.linear(x, layer.weight.clone(), layer.bias),
    "an own function": lambda x, layer: ByHand.apply(x, layer.weight),
}


def past_a_layer(way, recomputed=None):
    """Three Linears; the second's product is computed in this way and not by a call. ``recomputed``: in the backward
    pass alone, by checkpointing that is reentrant or not."""

    def past(model, x):
        now = model.training if recomputed is None else torch._C._current_graph_task_id() != -1
        return PAST[way](x, model.inner) if now else model.inner(x)

    def block(model, x):
        return model.down(functional.gelu(model.past(x)))

    def forward(model, x):
        x = model.enter(x)
        if recomputed is None or not model.training:
            return block(model, x)
        return checkpoint(partial(block, model), x, use_reentrant=recomputed)

    return {"build": lambda: net(forward, enter=(32, 32), past=net(past, inner=(32, 64)), down=(64, 32))}


def frozen_and_passed_by():
    """Uses the weight of its frozen second layer without calling the layer."""

    def forward(model, x):
        return model.out(functional.linear(model.enter(x), model.middle.weight, model.middle.bias))

    return net(forward, enter=(32, 32), middle=Linear(32, 64).requires_grad_(False), out=(64, 32))


def all_by_itself():
    return net(lambda model, x: functional.linear(x, model.only.weight.detach()), only=(32, 32))


def multiplies_the_head(model, x):
    inner = model.blocks[1]
    hidden = model.blocks[0](model.enter(x))
    return (functional.linear(functional.gelu(inner.up(hidden)), inner.down.weight) - x).float().square().mean()


def cut_off(model):
    """By a hook of a layer whose sizes another layer has too."""
    model.blocks[1].down.register_forward_hook(lambda module, given, output: output.detach())


def every_second():
    """FP8 that is off in each second call of a layer."""
    calls = {}

    def on(layer):
        calls[layer] = calls.get(layer, 0) + 1
        return calls[layer] % 2 == 0

    return on


INPUT_TAKES_GRADIENTS = {"loss": lambda model, x: squares(model, x.requires_grad_())}
FORWARD, RECOMPUTE = L.FPROP_NOT_IN_FP8, L.RECOMPUTE_NOT_IN_FP8

FAULTS = {
    # name: (parts of the workload, code, what the message names)
    **{f"past by {way}": (past_a_layer(way), FORWARD, "past.inner, bfloat16 by past") for way in list(PAST)[:3]},
    "past by an own function": (past_a_layer("an own function"), L.DGRAD_NOT_IN_FP8, "of 1 of 3 layers"),
    "recomputed by batches": (past_a_layer("batches", True), RECOMPUTE, "past.inner, bfloat16 by past"),
    # torch itself refuses a recomputation that is not reentrant and saves other tensors.
    "recomputed by a clone": (past_a_layer("a clone", False), RECOMPUTE, "past.inner, bfloat16 by past"),
    "past a frozen layer": ({"build": frozen_and_passed_by}, FORWARD, "middle, bfloat16 by the model itself"),
    "past by the loss": ({"loss": multiplies_the_head}, FORWARD, "blocks.1.down, bfloat16 by code outside all modules"),
    "past all layers": ({"build": all_by_itself, **INPUT_TAKES_GRADIENTS}, L.NEVER_CALLED, ""),
    "layers of before": ({"build": partial(direct, True)}, L.NEVER_CALLED, "references to the unconverted modules"),
    "cut off from the loss": ({"convert": by_torchao(then=cut_off)}, L.NO_GRADIENT, "blocks.1.down"),
    "left for Accelerate": ({"case": ACCELERATE, "leave": ("blocks.0.up",)}, L.LEFT_AND_CONVERTED, "blocks.0.up"),
    "gradients": (
        {"convert": FORWARD_ALONE},
        L.GRADIENTS_NOT_IN_FP8,
        "blocks.0.up by blocks.0",
    ),
    "for inference": ({"convert": with_own_layers(kind=OfStoredWeight)}, L.FREEZES_TRAINED, "requires_grad False"),
    "another recipe of weights": ({"convert": with_wrapped_weights()}, L.OTHER_RECIPE, "rowwise"),
    "past a weight's wrapper": ({"convert": past_its_wrapper}, FORWARD, "bfloat16: blocks.0.up"),
    "evaluation alone": (
        {"convert": with_own_layers(on=lambda layer: not layer.training), "step": loop(evaluate=16)},
        L.NO_FORWARD_IN_FP8,
        "evaluation: 5",
    ),
    "each second call": ({"convert": with_own_layers(on=every_second()), "step": loop(2)}, FORWARD, "of 10 calls"),
}
BESIDE_THE_REFERENCE = {L.NO_GRADIENT, L.FREEZES_TRAINED}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_has_its_own_code_and_names_its_layer(name):
    parts, code, says = FAULTS[name]
    decision = judge_both(**parts) if code in BESIDE_THE_REFERENCE else judge(serve(**parts), parts.get("case", CASE))
    verdict_of(decision, Verdict.FAIL, code, says)


def test_a_conversion_that_renames_layers_is_an_error():
    with pytest.raises(LookupError, match=r"must keep the names.* gone: enter, .* and 1 more") as error:
        serve(convert=lambda model: torch.nn.Sequential(by_torchao()(model)))
    assert "return the model itself" in error.value.fp8_next


# -- both arms beside each other --------------------------------------------------------------------------------------

ENDS = {"enter": (32, 32), "leave": (32, 32)}


def raw():
    """Of eight products that are needed five are of Linears."""
    mixing = nn.Parameter(torch.randn(32, 32) / 6)
    return net(lambda model, x: model.leave(model.enter(x) @ model.mixing), **ENDS, mixing=mixing)


def summed():
    """A slice and a logged number before the activation."""

    def forward(model, x):
        hidden = model.enter(x)
        hidden = hidden[:48] + hidden[48:]
        model.seen = (hidden.argmax(-1) == 0).sum().item()
        return model.leave(model.activation(hidden))

    model = net(forward, **ENDS)
    model.activation = functional.gelu
    return model


def dropping(reentrant):
    """Two blocks that recompute themselves, with a dropout between their Linears and one at their end."""

    def inner(block, x):
        hidden = functional.dropout(functional.gelu(block.up(x)), 0.02, block.training)
        return functional.dropout(block.down(hidden), 0.2, block.training)

    def forward(block, x):
        return x + checkpoint(partial(inner, block), x, use_reentrant=reentrant)

    return lambda: nn.Sequential(nn.Linear(32, 32), *(net(forward, **SIZES) for _ in range(2)))


class Fused(nn.LayerNorm):
    def forward(self, x):
        return functional.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


def distilled(model, x):
    """Trains on tokens that the model itself chose."""
    with torch.no_grad():
        chosen = model(x).argmax(-1)
    return (model(functional.one_hot(chosen, 32).to(x.dtype)) - x).square().mean()


ALIKE = {
    "a loop": {"step": loop(2, clip=0.1, evaluate=True)},
    "a norm of an own class": {
        "build": lambda: nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 32)),
        "convert": by_torchao(then=lambda model: setattr(model[1], "__class__", Fused)),
    },
    "a slice and a logged number": {"build": summed, "loss": lambda model, x: model(x).square().mean()},
    "tokens of the model's own": {"loss": distilled},
    "recomputed": {"build": dropping(False), "step": loop(2, evaluate=True)},
    "recomputed reentrantly": {"build": dropping(True), "step": loop(2, evaluate=True)},
    "Accelerate": {"case": replace(CASE, backend="accelerate_torchao"), "build": raw},
}


@pytest.mark.parametrize("name", ALIKE)
def test_a_sound_workload_has_no_difference(name):
    both = ledgers(**ALIKE[name])
    assert compare(both) == []
    assert not both.fp8.recomputed_otherwise


def evaluated_in_bf16(model, x, optimizer, precision):
    """Swaps a layer for the evaluation."""
    loss = loop()(model, x, optimizer, precision)
    layer = model.blocks[0].up
    if type(layer) is not Linear:
        model.blocks[0].up = OwnLinear(layer, on=lambda twin: False)
    with torch.no_grad():
        model(x[:16])
    model.blocks[0].up = layer
    return loss


RELU = by_torchao(then=lambda model: setattr(model, "activation", functional.relu))
SAID = {
    # name: (parts of the workload, verdict, what is said)
    "a function": (
        {"convert": with_function_in_blocks()},
        Verdict.PASS,
        ["100.0% of the step's GEMM FLOPs", "its recipe was not read", "in FP8 where no Linear is called"],
    ),
    "a large share outside the Linears": (
        {"build": Raw},
        Verdict.PASS,
        ["1 of 1 Linears in FP8", "outside the Linears", "mm of the model itself"],
    ),
    "evaluated in BF16": ({"step": evaluated_in_bf16}, Verdict.PASS, ["evaluate with other modules"]),
    "rows that a router chooses": (
        {"build": routed},
        Verdict.PASS,
        ["not compared", *(f"experts.{index}" for index in range(3))],
    ),
    "another activation": ({**ALIKE["a slice and a logged number"], "convert": RELU}, Verdict.INVALID, ["relu"]),
}


@pytest.mark.parametrize("name", SAID)
def test_what_the_layers_question_says_of_both_arms(name):
    parts, verdict, words = SAID[name]
    verdict_of(judge_both(**parts), verdict, *words)


def test_data_that_a_loss_draws_for_one_arm_alone_is_other_data():
    def shuffled(model, x):
        own = x + random.Random(time.perf_counter_ns()).random()
        return (model(x) - x).square().mean() + (model(own) - x).square().mean()

    assert "other inputs" in compare(ledgers(loss=shuffled))[0].headline


def test_what_another_thread_does_meanwhile_is_no_part_of_the_step():
    stop = threading.Event()
    other = nn.Identity()

    def beat():
        while not stop.is_set():
            other(None)
            time.sleep(0.0001)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        found = serve().ledger()
    finally:
        stop.set()
        thread.join()
    assert not [call for call in found["calls"] if "Identity" in call["module"]]


# -- optimizers -------------------------------------------------------------------------------------------------------


def configure(model, weight_decay=0.1, rate=1e-3):
    """Groups of its own, as nanoGPT's model makes them."""
    first, *others = model.parameters()
    groups = [
        {"params": [first], "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0, "lr": rate / 10},
    ]
    return torch.optim.AdamW(groups, lr=rate)


def test_a_function_whose_argument_is_called_model_is_given_the_model_in_both_arms():
    both = ledgers(optimizer=configure)
    for arm in (both.reference, both.fp8):
        made = arm.optimizer
        assert [name for name, group in made.members.items() if group == 0] == ["enter.weight"]
        assert [(group["weight_decay"], group["lr"]) for group in made.groups] == [("0.1", "0.001"), ("0", "0.0001")]
    assert takes_model(functools.partial(configure, weight_decay=0.1))
    assert not takes_model(lambda models: None)
    assert not takes_model(functools.partial(configure, None))
