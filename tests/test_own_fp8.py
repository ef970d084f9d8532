"""FP8 that is nobody's class is known by its products; what it leaves in high precision is named."""

from __future__ import annotations

import pytest

pytest.importorskip("torchao")

from helpers import own_fp8
from helpers.evidence import verdict_of
from helpers.loops import judge_both, ledgers, loop
from pytest_fp8 import Verdict
from pytest_fp8.codes import L
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


SOUND = {
    "layers": {"convert": own_fp8.with_own_layers()},
    "a function in place of layers": {"convert": own_fp8.with_function_in_blocks()},
    "raw parameters": {"build": own_fp8.Raw, "convert": own_fp8.with_raw_in_fp8},
}


@pytest.mark.parametrize("name", SOUND)
def test_sound_fp8_of_ones_own_passes_and_says_what_was_not_judged(name):
    parts = {"loss": squares, **SOUND[name]}
    decision = judge_both(**parts)
    verdict_of(decision, Verdict.PASS, "100.0% of the step's GEMM FLOPs", "its recipe was not read")
    assert decision.figures.converted == decision.figures.linears
    assert ("in FP8 where no Linear is called" in decision.headline) == (name != "layers")
    assert {role: count["fp8"] == count["expected"] for role, count in decision.figures.roles.items()} == dict.fromkeys(
        ROLES, True
    )
    assert compare(ledgers(**parts)) == []


@pytest.mark.parametrize(
    ("parts", "code", "says"),
    [
        ({"convert": lambda model: model}, L.NOTHING_CONVERTED, "5 Linears could be FP8"),
        ({"convert": own_fp8.with_own_layers("enter", "blocks.0.up")}, L.UNACCOUNTED, "blocks.0.down"),
        (
            {"convert": own_fp8.with_own_layers(function=own_fp8.ForwardAlone)},
            L.DGRAD_NOT_IN_FP8,
            "bfloat16: blocks.0.up",
        ),
        (
            {"convert": own_fp8.with_function_in_blocks(own_fp8.ForwardAlone)},
            L.GRADIENTS_NOT_IN_FP8,
            "blocks.0.up by blocks.0",
        ),
        (
            {"build": lambda: own_fp8.Raw(own_fp8.ForwardAlone), "convert": own_fp8.with_raw_in_fp8},
            L.GRADIENTS_NOT_IN_FP8,
            "the model itself (32 to 256)",
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
    ids=["nothing", "some", "forward", "function forward", "raw forward", "evaluation", "each second", "left"],
)
def test_a_fault_of_fp8_of_ones_own_has_its_own_cause(parts, code, says):
    verdict_of(judge_both(**{"loss": squares, **parts} if "step" not in parts else parts), Verdict.FAIL, code, says)


def test_a_large_share_outside_the_linears_is_named_with_who_multiplies():
    decision = judge_both(build=own_fp8.Raw, loss=squares)
    verdict_of(decision, Verdict.PASS, "1 of 1 Linears in FP8", "outside the Linears", "mm of the model itself")
    assert decision.figures.fp8_share < 0.1


def test_an_arm_may_evaluate_in_bf16_by_swapping_its_layers():
    import torch

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
