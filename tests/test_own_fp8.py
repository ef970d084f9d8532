"""FP8 that is nobody's class is known by its products; what it leaves in high precision is named."""

from __future__ import annotations

from functools import partial

import pytest

pytest.importorskip("torchao")

import torch

from benchmarks.healthy.run import Runner
from benchmarks.healthy.sound import Sound
from helpers import own_fp8
from helpers.evidence import verdict_of
from helpers.loops import batch, build, judge_both, ledgers, loop
from pytest_fp8 import Verdict, Workload
from pytest_fp8.codes import C, L, N
from pytest_fp8.questions.ledger.compare import compare
from pytest_fp8.recipes import ROLES

pytestmark = pytest.mark.slow


def squares(model, x):
    return (model(x) - x).float().pow(2).mean()


def first_micro_batch_off():
    """FP8 that is off in each second call of a layer."""
    calls = {}

    def on(layer):
        calls[layer] = calls.get(layer, 0) + 1
        return calls[layer] % 2 == 0

    return on


def first_steps(number):
    """FP8 that is on in a layer's first calls alone."""
    calls = {}

    def on(layer):
        calls[layer] = calls.get(layer, 0) + 1
        return calls[layer] <= number

    return on


SOUND = {
    "layers": {"convert": own_fp8.with_own_layers()},
    "a function in place of layers": {"convert": own_fp8.with_function_in_blocks()},
    "raw parameters": {"build": own_fp8.Raw, "convert": own_fp8.with_raw_in_fp8},
    "torchao's weights": {"convert": own_fp8.with_wrapped_weights(float8_linear_recipe="tensorwise")},
    "a function, recomputed": {
        "build": partial(build, checkpointed=True),
        "convert": own_fp8.with_function_in_blocks(),
    },
}


@pytest.mark.parametrize("name", SOUND)
def test_sound_fp8_of_ones_own_passes_and_says_what_was_not_judged(name):
    parts = {"loss": squares, **SOUND[name]}
    decision = judge_both(**parts)
    verdict_of(decision, Verdict.PASS, "100.0% of the step's GEMM FLOPs")
    assert decision.figures.converted == decision.figures.linears
    assert ("its recipe was not read" in decision.headline) == (name != "torchao's weights")
    in_functions = name in ("a function in place of layers", "raw parameters", "a function, recomputed")
    assert ("in FP8 where no Linear is called" in decision.headline) == in_functions
    assert {*ROLES} <= {*decision.figures.roles}
    assert all(count["fp8"] == count["expected"] for count in decision.figures.roles.values())
    assert compare(ledgers(**parts)) == []


@pytest.mark.parametrize(
    ("parts", "code", "says"),
    [
        ({"convert": lambda model: model}, L.NOTHING_CONVERTED, "5 Linears could be FP8 and are not"),
        ({"convert": own_fp8.with_own_layers("enter", "blocks.0.up")}, L.UNACCOUNTED, "blocks.0.down"),
        (
            {"convert": own_fp8.with_function_in_blocks(own_fp8.ForwardAlone)},
            L.GRADIENTS_NOT_IN_FP8,
            "blocks.0.up by blocks.0",
        ),
        (
            {"convert": own_fp8.with_own_layers(function=own_fp8.NoWgrad)},
            L.WGRAD_NOT_IN_FP8,
            "wgrad of 5 of 5 layers",
        ),
        (
            {"convert": own_fp8.with_own_layers(kind=own_fp8.OfStoredWeight)},
            L.FREEZES_TRAINED,
            "requires_grad False",
        ),
        (
            {"convert": own_fp8.with_wrapped_weights()},
            L.OTHER_RECIPE,
            "rowwise",
        ),
        (
            {
                "convert": own_fp8.with_wrapped_weights(
                    break_it=own_fp8.past_its_wrapper, float8_linear_recipe="tensorwise"
                )
            },
            L.FPROP_NOT_IN_FP8,
            "bfloat16: blocks.0.up",
        ),
        (
            {
                "build": partial(build, checkpointed=True, reentrant=True),
                "convert": own_fp8.with_own_layers(on=lambda _: torch._C._current_graph_task_id() == -1),
            },
            L.RECOMPUTE_NOT_IN_FP8,
            "of 4 layers",
        ),
        (
            {"convert": own_fp8.with_own_layers(on=lambda layer: not layer.training), "step": loop(evaluate=16)},
            L.NO_FORWARD_IN_FP8,
            "evaluation: 5",
        ),
        (
            {"convert": own_fp8.with_own_layers(on=first_micro_batch_off()), "step": loop(parts=2)},
            L.FPROP_NOT_IN_FP8,
            "of 10 calls",
        ),
        (
            {"convert": own_fp8.with_own_layers(), "leave": ("enter",)},
            L.LEFT_AND_CONVERTED,
            "enter left alone",
        ),
    ],
    ids=[
        "nothing",
        "some",
        "function forward",
        "wgrad",
        "inference",
        "other recipe of weights",
        "past a weight",
        "recomputation",
        "evaluation",
        "each second",
        "left",
    ],
)
def test_a_fault_of_fp8_of_ones_own_has_its_own_cause(parts, code, says):
    verdict_of(judge_both(**{"loss": squares, **parts} if "step" not in parts else parts), Verdict.FAIL, code, says)


def test_a_large_share_outside_the_linears_is_named_with_who_multiplies():
    decision = judge_both(build=own_fp8.Raw, loss=squares)
    verdict_of(decision, Verdict.PASS, "1 of 1 Linears in FP8", "outside the Linears", "mm of the model itself")
    assert decision.figures.fp8_share < 0.1


def test_an_arm_may_evaluate_in_bf16_by_swapping_its_layers():
    def step(model, x, optimizer, precision):
        with precision():
            loss = squares(model, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        layer = model.blocks[0].up
        if type(layer) is not torch.nn.Linear:
            model.blocks[0].up = own_fp8.OwnLinear(layer, on=lambda twin: False)
        with torch.no_grad():
            model(x[:16])
        model.blocks[0].up = layer
        return loss.detach()

    verdict_of(judge_both(step=step), Verdict.PASS, "evaluate with other modules")


# -- every question ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runner():
    with Runner() as made:
        yield made


def entry(convert):
    return Sound("own", "", lambda: Workload(build=build, batch=batch, loss=squares, convert=convert), {})


def test_every_question_is_asked_of_layers_that_their_products_show(runner):
    answers = {each.question: each for each in runner.ask(entry(own_fp8.with_own_layers()), "tensorwise")}
    assert {name: each.verdict for name, each in answers.items()} == dict.fromkeys(
        ("layers", "numerics", "loss", "checkpoints"), "PASS"
    )
    assert "14 products of 5 layers right" in answers["numerics"].message


@pytest.mark.parametrize(
    ("convert", "question", "code", "about"),
    [
        (own_fp8.with_own_layers(function=own_fp8.OfOtherRows), "numerics", N.UNRELATED, "wgrad"),
        (own_fp8.with_own_layers(kind=own_fp8.KeepsItsWeight), "numerics", N.STALE, "fprop"),
        (own_fp8.with_own_layers(on=first_steps(8)), "loss", C.FP8_LOST, ""),
    ],
    ids=["other rows", "a weight that is kept", "FP8 ends after eight steps"],
)
def test_a_fault_inside_layers_of_ones_own_is_found_by_the_question_that_it_concerns(
    runner, convert, question, code, about
):
    decision = getattr(runner.pair(entry(convert), "tensorwise"), question)()
    verdict_of(decision, Verdict.FAIL, code, about)
