"""Sound workloads of many kinds pass every question in real arms, and what is not sound of a conversion of one's own or
of a gradient is found. The whole catalogue: ``python -m benchmarks.healthy``."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("torchao")

import torch

from benchmarks.healthy.__main__ import CATALOGUE, Runner
from benchmarks.healthy.own_fp8 import Product
from benchmarks.healthy.sound import Net, Sound, apart, rows
from helpers.evidence import verdict_of
from helpers.nets import batch, build, squares, with_own_layers
from pytest_fp8 import Verdict, Workload
from pytest_fp8.codes import C, L, N

pytestmark = pytest.mark.slow

BY_NAME = {entry.name: entry for entry in CATALOGUE}
EACH_COMMIT = (
    "augmented_by_numpy",
    "block_of_every_other_step",
    "gradual_unfreezing",
    "layer_that_casts",
    "sam_of_two_steps",
)
"""One a kind: data, layers that come and go, frozen weights, a layer, a step."""
EACH_NIGHT = (
    "plateau",
    "replay_in_the_model",
    "no_gradient",
    "adds_its_gradient_by_itself",
    *[entry.name for entry in CATALOGUE][::4],
)
ROUNDED = "round_scales_to_power_of_2"


@pytest.fixture(scope="module")
def runner():
    with Runner() as made:
        yield made


def by(recipe_of, **more):
    """convert() that gives each layer the recipe of its name; none where that is empty."""

    def convert(model):
        from torchao.float8 import convert_to_float8_training

        from pytest_fp8.backends.torchao import torchao_config

        recipes = {name: recipe_of(name) for name, _ in model.named_modules()}
        for recipe in sorted({*recipes.values()} - {""}):
            config = torchao_config(recipe, emulated=True, **more)
            convert_to_float8_training(
                model, config=config, module_filter_fn=lambda _, name, recipe=recipe: recipes[name] == recipe
            )
        return model

    return convert


def entry(convert=None, **options):
    """The catalogue's small net, by this conversion."""
    given = {"options": options} if options else {}
    return Sound("own", "", lambda: Workload(build=Net, batch=rows, loss=apart, convert=convert), given)


def own(convert):
    return Sound("own", "", lambda: Workload(build=build, batch=batch, loss=squares, convert=convert), {})


SOUND = {
    **{name: BY_NAME[name] for name in EACH_COMMIT},
    "FP8 layers of one's own": own(with_own_layers()),
    "rounded scales": entry(by(lambda name: "tensorwise", **{ROUNDED: True}), **{ROUNDED: True}),
    "two recipes": entry(by(lambda name: "rowwise_with_gw_hp" if name == "last" else "tensorwise")),
}
SAYS = {
    "FP8 layers of one's own": ("numerics", "14 products of 5 layers right"),
    "two recipes": ("layers", "by another recipe than tensorwise: last by rowwise_with_gw_hp"),
}


NIGHTLY = [pytest.param(name, marks=pytest.mark.nightly) for name in dict.fromkeys(EACH_NIGHT) if name not in SOUND]


@pytest.mark.parametrize("name", [*SOUND, *NIGHTLY])
def test_a_sound_workload_hears_no_alarm(runner, name):
    asked = {**BY_NAME, **SOUND}[name]
    answers = {answer.question: answer for answer in runner.ask(asked, "tensorwise")}
    alarms = [answer.message for answer in answers.values() if answer.alarm]
    assert not alarms, "\n".join(alarms)
    assert {"layers", "numerics", "loss"} <= answers.keys()
    for question, words in filter(None, [SAYS.get(name)]):
        assert words in answers[question].message


class OfOtherRows(Product):
    """The weight's gradient is that of the rows in another order."""

    @staticmethod
    def backward(ctx, *given):
        x, *others = ctx.saved_tensors
        rolled = x.view(torch.int8).roll(1, 0).view(x.dtype)
        return Product.backward(SimpleNamespace(saved_tensors=(rolled, *others)), *given)


class KeepsItsWeight(torch.nn.Module):
    """Multiplies by the FP8 weight of its first step for good."""

    def __init__(self, old):
        super().__init__()
        self.weight, self.bias, self.kept = old.weight, old.bias, None

    def forward(self, x):
        if self.kept is None:
            self.kept = self.weight.detach().clone()
        # The gradient goes to the weight all the same.
        return Product.apply(x, self.kept + self.weight - self.weight.detach()) + self.bias


def first_steps(number):
    """FP8 that is on in a layer's first calls alone."""
    calls = {}

    def on(layer):
        calls[layer] = calls.get(layer, 0) + 1
        return calls[layer] <= number

    return on


@pytest.mark.parametrize(
    ("broken", "question", "code", "about"),
    [
        (entry(by(lambda name: "tensorwise" if name == "last" else "")), "layers", L.UNACCOUNTED, ""),
        (entry(by(lambda name: "rowwise")), "layers", L.OTHER_RECIPE, ""),
        (entry(by(lambda name: "tensorwise", **{ROUNDED: True}), **{ROUNDED: False}), "layers", None, ROUNDED),
        (entry(by(lambda name: "tensorwise", **{ROUNDED: False}), **{ROUNDED: True}), "layers", None, ROUNDED),
        (own(with_own_layers(function=OfOtherRows)), "numerics", N.UNRELATED, "wgrad"),
        (own(with_own_layers(kind=KeepsItsWeight)), "numerics", N.STALE, "fprop"),
        (own(with_own_layers(on=first_steps(8))), "loss", C.FP8_LOST, ""),
    ],
    ids=["not all", "another recipe", "rounded", "not rounded", "other rows", "a kept weight", "FP8 ends"],
)
def test_a_fault_of_ones_own_conversion_is_found_by_its_question(runner, broken, question, code, about):
    decision = getattr(runner.pair(broken, "tensorwise"), question)()
    verdict_of(decision, Verdict.FAIL, *filter(None, [code]), about)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("factor", "verdict"),
    [
        (1.0, Verdict.PASS),
        (2.0, Verdict.FAIL),
        (-1.0, Verdict.FAIL),
    ],
)
def test_a_wrong_gradient_fails_where_gradients_cancel_between_rows(runner, factor, verdict):
    """Its limit is wide there, beside operands that are moved row by row; no product is wrong. On a CPU with matrix
    units for bfloat16 the healthy gradient's gain is 0.89 and may be 0.39 from 1: a factor of 1.5 is within that."""

    def convert(model):
        by(lambda name: "" if "classifier" in name else "tensorwise")(model)
        model.bert.encoder.layer[1].output.LayerNorm.bias.register_hook(lambda gradient: factor * gradient)
        return model

    chooses = BY_NAME["hf_bert_chooses"]
    wrong = Sound("broken", "", lambda: replace(chooses.workload(0), convert=convert))
    decision = runner.pair(wrong, "tensorwise").numerics()
    assert decision.verdict is verdict, decision.message


def test_the_catalogue_is_wide():
    assert len(BY_NAME) == len(CATALOGUE) >= 90
    assert all(entry.what.endswith(".") for entry in CATALOGUE), "each says what is special about it"
