"""What a conversion of the user's own may take, and how the mark declares it: rounded scales, two recipes."""

from __future__ import annotations

import pytest

pytest.importorskip("torchao")

from benchmarks.healthy.run import Runner
from benchmarks.healthy.sound import Net, Sound, apart, rows
from pytest_fp8 import Workload
from pytest_fp8.codes import L

pytestmark = pytest.mark.slow

ROUNDED = "round_scales_to_power_of_2"


@pytest.fixture(scope="module")
def runner():
    with Runner() as made:
        yield made


def by(recipe_of, **more):
    """convert() that gives each layer the recipe of its name."""

    def convert(model):
        from torchao.float8 import convert_to_float8_training

        from pytest_fp8.backends.torchao import torchao_config

        for recipe in sorted({recipe_of(name) for name, _ in model.named_children()}):
            config = torchao_config(recipe, emulated=True, **more)
            convert_to_float8_training(
                model, config=config, module_filter_fn=lambda _, name, recipe=recipe: recipe_of(name) == recipe
            )
        return model

    return convert


def entry(name, options, convert=None):
    return Sound(name, "", lambda: Workload(build=Net, batch=rows, loss=apart, convert=convert), {"options": options})


@pytest.mark.nightly_beyond(1)
@pytest.mark.parametrize(
    "convert",
    [
        pytest.param(None, id="library", marks=pytest.mark.nightly),
        pytest.param(by(lambda name: "tensorwise", **{ROUNDED: True}), id="own"),
    ],
)
def test_rounded_scales_that_the_mark_declares_pass(runner, convert):
    answers = list(runner.ask(entry("declared", {ROUNDED: True}, convert), "tensorwise"))
    assert not [answer.message for answer in answers if answer.alarm]


@pytest.mark.parametrize("declared", [True, False])
def test_scales_that_are_rounded_otherwise_than_declared_fail(runner, declared):
    convert = by(lambda name: "tensorwise", **{ROUNDED: not declared})
    decision = runner.pair(entry("otherwise", {ROUNDED: declared}, convert), "tensorwise").layers()
    assert decision.verdict.value == "FAIL"
    assert ROUNDED in decision.message


def test_two_recipes_in_one_model_pass_and_are_named(runner):
    convert = by(lambda name: "rowwise_with_gw_hp" if name == "last" else "tensorwise")
    answers = {each.question: each for each in runner.ask(entry("two recipes", {}, convert), "tensorwise")}
    assert not [answer.message for answer in answers.values() if answer.alarm]
    assert "by another recipe than tensorwise: last by rowwise_with_gw_hp" in answers["layers"].message


def test_a_recipe_that_no_layer_has_is_not_taken_for_a_second_one(runner):
    decision = runner.pair(entry("other", {}, by(lambda name: "rowwise")), "tensorwise").layers()
    assert decision.code is L.OTHER_RECIPE
