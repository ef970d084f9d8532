"""Two ledgers compared: what FP8 explains, a router decides, or one arm does not tell is no difference."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from helpers.evidence import UPDATES, WEIGHT, arm_ledger, sketch
from helpers.two_ledgers import HEALTHY, IN_FLOAT32, call, entered, head, ledgers, updates, weights, without
from pytest_fp8.codes import D
from pytest_fp8.questions.layers.products import Product
from pytest_fp8.questions.ledger.compare import compare
from pytest_fp8.questions.ledger.evidence import NO_UPDATES, ModuleCalls, OptimizerNote, OwnedProduct, TensorNote


@pytest.mark.parametrize(
    "made",
    [
        updates(1.001, -2.0, 2.0),  # single values that were rounded otherwise
        updates(9.0, 9.0, 9.0, size=1.0),  # gradients of another size
        updates(9.0, 9.0, 9.0, steps=2),
        NO_UPDATES,
    ],
)
def test_updates_that_cannot_tell_another_rule_are_no_difference(made):
    assert compare(ledgers(updates=made)) == []


def test_updates_of_a_loss_that_is_not_finite_tell_nothing():
    assert compare(ledgers(updates=updates(1.2, -2.0, 2.0), loss=math.nan)) == []


def test_equal_arms_have_none():
    assert compare(ledgers()) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"waits": {"q": {"forward": 3}}},
        {"operators": {**HEALTHY.operators, "q": {"amax float32": 2}}},
        {"products": [*head(), OwnedProduct("q", Product("forward", 64, (48, 64), "fp8", "mm"))]},
        {"calls": [*call("q", dtype="float8"), ModuleCalls("q.cast", "forward", [48, 64], "bfloat16", True, 2)]},
        {"after": {**HEALTHY.after, "q.scale": replace(WEIGHT, buffer=True)}},
        {"after": weights(dtype="uint8", digest="")},
    ],
)
def test_what_fp8_explains_is_no_difference(changes):
    assert compare(ledgers(**changes)) == []


def test_rows_that_a_router_chooses_may_differ():
    routed = [*HEALTHY.calls, ModuleCalls("expert", "forward", [16, 64], "bfloat16", True, 1)]
    products = [*head(), OwnedProduct("expert", Product("forward", 64, (16, 64), "bfloat16", "mm"))]
    gradients = [*HEALTHY.gradients, "expert.weight"]
    reference = arm_ledger(calls=routed, products=products, gradients=gradients, routed=["expert"])
    assert compare(ledgers(reference=reference, random="other")) == []
    assert compare(ledgers(reference=reference, gradients=["q.weight"])) != []
    batch = entered(replace(HEALTHY.batch[0], digest="other"))
    assert compare(ledgers(routed=[""], entered=batch)) != [], "a model that routes is given the same batch"
    assert compare(ledgers(routed=[""], entered=entered(TensorNote([16, 64], "bfloat16")))) == []
    assert compare(ledgers(reference=reference, calls=without("norm"))) != [], "all else is still compared"


@pytest.mark.parametrize("routed", [True, False])
def test_a_converted_layer_may_rest_where_a_router_gives_it_no_rows(routed):
    found = compare(ledgers(calls=without("q"), routed=["q"] * routed))
    assert any("never called" in each.headline for each in found) is not routed


def test_updates_that_are_no_plain_numbers_are_not_compared():
    unread = replace(UPDATES, digests={**UPDATES.digests, "q.weight": ""}, sketches={**UPDATES.sketches})
    other = replace(UPDATES, sketches={**UPDATES.sketches, "q.weight": sketch(9.0, 9.0, 9.0)})
    assert compare(ledgers(reference=arm_ledger(updates=other), updates=unread)) == []
    assert compare(ledgers(reference=arm_ledger(updates=unread), updates=other)) == []


def test_operators_of_a_routed_module_are_not_compared():
    more = {**HEALTHY.operators, "norm": IN_FLOAT32}
    assert compare(ledgers(routed=["norm"], operators=more)) == []
    assert compare(ledgers(routed=["q"], operators=more)) != []


def test_autocast_is_accelerates_own():
    changes = {
        "switches": {**HEALTHY.switches, "autocast on cuda": "torch.bfloat16"},
        "operators": {**HEALTHY.operators, "norm": IN_FLOAT32},
        "products": head("float32"),
        "loss_dtype": "bfloat16",
    }
    assert compare(ledgers("accelerate_te", **changes)) == []
    assert len(compare(ledgers("transformer_engine", **changes))) == 4


def test_a_tensor_that_the_model_computed_is_compared_by_its_shape():
    computed = TensorNote([48, 64], "bfloat16", "")
    assert compare(ledgers(reference=arm_ledger(entered=entered(computed)), entered=entered(computed))) == []


def test_groups_may_be_split_otherwise():
    split = OptimizerNote("AdamW", [{"lr": "0.001"}] * 2, {"q.weight": 0, "up.weight": 1, "lm_head.weight": 1})
    assert compare(ledgers(optimizer=split)) == []


def test_a_number_that_one_arm_does_not_tell_is_no_difference():
    def norm(*operators):
        return {**HEALTHY.operators, "norm": dict.fromkeys(operators, 1)}

    reference = arm_ledger(operators=norm("native_layer_norm bfloat16 1e-05"))
    assert compare(ledgers(reference=reference, operators=norm("native_layer_norm bfloat16"))) == []
    (found,) = compare(ledgers(reference=reference, operators=norm("native_layer_norm bfloat16 0.02")))
    assert found.code is D.OTHER_OPERATOR_SETTING
    said, unsaid = {"": {"abs bfloat16": 1}}, norm("native_layer_norm bfloat16")
    (found,) = compare(ledgers(reference=reference, operators={**unsaid, **said}))
    assert "operators of the model itself" in found.headline, "what comes after it is compared all the same"
