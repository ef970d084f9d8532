"""Two ledgers compared: each fact that differs is named; what FP8 explains, or a router decides, is no difference."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from helpers.evidence import UPDATES, WEIGHT, arm_ledger, sketch, verdict_of
from helpers.two_ledgers import (
    DIFFERENCES,
    DRAW,
    GIVEN,
    HEALTHY,
    IN_FLOAT32,
    call,
    entered,
    head,
    ledgers,
    optimizer,
    updates,
    weights,
    without,
)
from pytest_fp8.codes import C, D, L
from pytest_fp8.questions.layers.products import Product
from pytest_fp8.questions.ledger.compare import blame_in_ledger, compare, find_in_ledger, unless_unlike
from pytest_fp8.questions.ledger.evidence import NO_UPDATES, ModuleCalls, OptimizerNote, OwnedProduct, TensorNote
from pytest_fp8.questions.ledger.rows import evaluated_otherwise, outermost
from pytest_fp8.verdicts import Decision, Verdict


@pytest.mark.parametrize(("changes", "code", "seen"), DIFFERENCES)
def test_a_difference_is_named_with_what_it_means(changes, code, seen):
    found = find_in_ledger(ledgers(**changes), "loss" if code in (D.OTHER_DATA, D.OTHER_INPUTS) else "layers")
    assert found is not None
    of_conversion = isinstance(code, L) or code is D.RECOMPUTED_OTHERWISE
    assert (found.code, found.verdict) == (code, Verdict.FAIL if of_conversion else Verdict.INVALID)
    assert seen in found.about + found.seen
    assert all((found.expected, found.cause, found.next_step))


@pytest.mark.parametrize(
    ("was", "code"),
    [({"same_as": "up.weight"}, L.UNTIED), ({"hooks": 1}, L.HOOK_GONE), ({"trained": False}, L.TRAINS_FROZEN)],
)
def test_what_the_conversion_takes_from_a_weight_is_named(was, code):
    before = {**HEALTHY.before, "q.weight": replace(WEIGHT, **was)}
    reference = arm_ledger(before=before, after=before)
    assert compare(ledgers(reference=reference, before=before, after=before)) == []
    [found] = compare(ledgers(reference=reference, before=before))
    assert (found.code, found.about) == (code, "q.weight")


def norm(*operators):
    return {**HEALTHY.operators, "norm": dict.fromkeys(operators, 1)}


EXPERT = [*HEALTHY.calls, ModuleCalls("expert", "forward", [16, 64], "bfloat16", True, 1)]
MATMUL = Product("forward", 64, (16, 64), "bfloat16", "mm")
ROUTED = arm_ledger(
    calls=EXPERT,
    products=[*head(), OwnedProduct("expert", MATMUL)],
    gradients=[*HEALTHY.gradients, "expert.weight"],
    routed=["expert"],
)
UNREAD = replace(UPDATES, digests={**UPDATES.digests, "q.weight": ""})
OTHER = replace(UPDATES, sketches={**UPDATES.sketches, "q.weight": sketch(9.0, 9.0, 9.0)})
COMPUTED = entered(TensorNote([48, 64], "bfloat16", ""))
SPLIT = OptimizerNote("AdamW", [{"lr": "0.001"}] * 2, {"q.weight": 0, "up.weight": 1, "lm_head.weight": 1})
CALLED_INSIDE = [*call("q", dtype="float8"), ModuleCalls("q.cast", "forward", [48, 64], "bfloat16", True, 2)]
UNDER_AUTOCAST = {
    "switches": {**HEALTHY.switches, "autocast on cuda": "torch.bfloat16"},
    "operators": {**HEALTHY.operators, "norm": IN_FLOAT32},
    "products": head("float32"),
    "loss_dtype": "bfloat16",
}
ALIKE = {
    "equal arms": {},
    "an FP8 layer waits": {"waits": {"q": {"forward": 3}}},
    "casts": {"operators": {**HEALTHY.operators, "q": {"amax float32": 2}}},
    "FP8 products": {"products": [*head(), OwnedProduct("q", replace(MATMUL, kind="fp8"))]},
    "a module inside a layer": {"calls": CALLED_INSIDE},
    "a scale": {"after": {**HEALTHY.after, "q.scale": replace(WEIGHT, buffer=True)}},
    "a weight in FP8": {"after": weights(dtype="uint8", digest="")},
    "single values rounded otherwise": {"updates": updates(1.001, -2.0, 2.0)},
    "gradients of another size": {"updates": updates(9.0, 9.0, 9.0, size=1.0)},
    "other steps": {"updates": updates(9.0, 9.0, 9.0, steps=2)},
    "no updates": {"updates": NO_UPDATES},
    "a loss that is not finite": {"updates": updates(1.2, -2.0, 2.0), "loss": math.nan},
    "updates that are no plain numbers": {"reference": arm_ledger(updates=OTHER), "updates": UNREAD},
    "of either arm": {"reference": arm_ledger(updates=UNREAD), "updates": OTHER},
    "an expert": {"reference": ROUTED, "random": "other"},
    "rows of a model that routes": {"routed": [""], "entered": entered(TensorNote([16, 64], "bfloat16"))},
    "operators of a routed module": {"routed": ["norm"], "operators": {**HEALTHY.operators, "norm": IN_FLOAT32}},
    "Accelerate's autocast": {"backend": "accelerate_te", **UNDER_AUTOCAST},
    "a computed tensor": {"reference": arm_ledger(entered=COMPUTED), "entered": COMPUTED},
    "other groups": {"optimizer": SPLIT},
    "a number that one arm does not tell": {
        "reference": arm_ledger(operators=norm("native_layer_norm bfloat16 1e-05")),
        "operators": norm("native_layer_norm bfloat16"),
    },
}


@pytest.mark.parametrize("name", ALIKE)
def test_what_fp8_explains_or_a_router_decides_is_no_difference(name):
    assert compare(ledgers(**ALIKE[name])) == []


DIFFERENT = [
    ({"reference": ROUTED, "gradients": ["q.weight"]}, L.NO_GRADIENT),
    ({"routed": [""], "entered": entered(replace(GIVEN, digest="other"))}, D.OTHER_INPUTS),
    ({"reference": ROUTED, "calls": without("norm")}, D.OTHER_WORK),
    ({"routed": ["q"], "operators": {**HEALTHY.operators, "norm": IN_FLOAT32}}, D.OTHER_PRECISION),
    (
        {
            "reference": arm_ledger(operators=norm("native_layer_norm bfloat16 1e-05")),
            "operators": norm("native_layer_norm bfloat16 0.02"),
        },
        D.OTHER_OPERATOR_SETTING,
    ),
    ({"products": [*HEALTHY.products, OwnedProduct("norm", MATMUL)]}, D.OTHER_WORK),
    ({"reference": arm_ledger(products=[*HEALTHY.products, OwnedProduct("norm", MATMUL)])}, D.OTHER_WORK),
    ({"backend": "transformer_engine", **UNDER_AUTOCAST}, D.OTHER_SWITCH),
    ({"calls": without("q")}, L.PASSED_BY),
]


@pytest.mark.parametrize(("changes", "code"), DIFFERENT)
def test_all_else_is_still_compared(changes, code):
    assert compare(ledgers(**changes))[0].code is code


def test_a_layer_may_rest_where_a_router_gives_it_no_rows():
    assert not [each for each in compare(ledgers(calls=without("q"), routed=["q"])) if each.code is L.PASSED_BY]


def test_the_first_switch_that_differs_is_the_same_in_each_process():
    """Switches are compared in their own order, not in that of a set's hashes."""
    on = dict.fromkeys(("w", "c", "a", "q", "b"), "on")
    found = compare(ledgers(reference=arm_ledger(switches=on), switches=dict.fromkeys(on, "off")))
    assert [one.about for one in found] == list(on)


def test_arms_may_evaluate_with_other_layers_and_not_be_timed_with_other_evaluations():
    evaluated = [replace(one, phase="evaluation", training=False) for one in HEALTHY.calls]
    swapped = [replace(one, module="(Linear 1)") if one.module == "q" else one for one in evaluated]
    both = ledgers(reference=arm_ledger(calls=[*HEALTHY.calls, *evaluated]), calls=[*HEALTHY.calls, *swapped])
    assert compare(both) == []
    assert evaluated_otherwise(both) == ["(Linear 1)", "q"]
    entered_too = ledgers(entered=[*HEALTHY.entered, replace(HEALTHY.entered[0], phase="evaluation")])
    assert find_in_ledger(entered_too, "layers") is None
    assert find_in_ledger(entered_too, "speedup").code is D.OTHER_WORK


def test_the_first_draw_from_another_state_is_named():
    first, second = DRAW, replace(DRAW, owner="up", state="s2")
    (found,) = compare(
        ledgers(reference=arm_ledger(draws=[first, second]), draws=[first, replace(second, state="s3")], random="other")
    )
    assert "by up in the forward pass, draw 2, from the generator's state s3" in found.seen


@pytest.mark.parametrize(("backend", "named"), [("torchao", True), ("te_fused", False)])
def test_attention_of_one_arm_alone_is_named(backend, named):
    here, there = ({**HEALTHY.switches, "flash_sdp_enabled": on} for on in ("True", "False"))
    found = compare(ledgers(backend, reference=arm_ledger(switches=here), switches=there))
    assert ["flash_sdp_enabled" in one.headline for one in found] == [True] * named


def test_outermost_names_lie_inside_no_other():
    assert outermost(["b.c", "a", "a.b.c", "ab", "b.c.d", "a.b"]) == ["a", "ab", "b.c"]
    assert outermost(["a", ""]) == [""]


# -- what two ledgers that differ make of a question's decision -------------------------------------------------------

CODE = C.HIGHER
"""Any code."""


def test_where_numerics_fail_on_other_work_that_is_said_first():
    failed = Decision(CODE, Verdict.FAIL, "2 of 3 gradients differ", seen="0.76 times BF16's", question="numerics")
    blamed = blame_in_ledger(failed, ledgers(operators={"": {"nll_loss_forward float32 2,-100": 1}}))
    verdict_of(blamed, Verdict.FAIL, D.OTHER_WORK, "2 of 3 gradients differ", "0.76 times")
    assert blame_in_ledger(failed, ledgers()) is failed


def test_other_data_concerns_the_loss_alone():
    other = ledgers(entered=entered(replace(GIVEN, digest="other")), batch=[replace(GIVEN, digest="other")])
    assert find_in_ledger(other, "loss").code is D.OTHER_DATA
    assert find_in_ledger(other, "speedup") is find_in_ledger(other, "layers") is None


def test_a_decision_about_arms_that_do_other_work_is_invalid():
    decision = Decision(None, Verdict.PASS, "1.96x", figures={"ratio": 1.96}, question="speedup")
    halved = ledgers(entered=entered(replace(GIVEN, shape=[24, 64])))
    verdict_of(unless_unlike(decision, halved), Verdict.INVALID, D.OTHER_WORK, "24x64")
    assert unless_unlike(decision, halved).numbers == {"ratio": 1.96}
    assert unless_unlike(decision, ledgers()) is decision
    broken = ledgers(after=weights(digest="2"))
    assert unless_unlike(decision, broken) is decision, "the layers question reports what the conversion broke"
    disturbed = Decision(CODE, Verdict.INVALID, "another process used the GPU", question="speedup")
    assert unless_unlike(disturbed, halved) is disturbed
    switched = ledgers(switches={**HEALTHY.switches, "torch.backends.cuda.matmul.allow_tf32": "True"})
    verdict_of(unless_unlike(disturbed, switched), Verdict.INVALID, D.OTHER_SWITCH, "allow_tf32")


@pytest.mark.parametrize("seen", [Verdict.PASS, Verdict.FAIL, Verdict.INVALID])
def test_weights_that_no_optimizer_steps_fail_the_loss_whatever_its_curves_say(seen):
    lost = ledgers(optimizer=optimizer(members={"q.weight": 0, "up.weight": 0}))
    judged = Decision(None if seen is Verdict.PASS else CODE, seen, "the curves", question="loss")
    verdict_of(unless_unlike(judged, lost), Verdict.FAIL, L.NOT_IN_OPTIMIZER, "lm_head.weight")
    timed = Decision(None, Verdict.PASS, "1.96x", question="speedup")
    assert unless_unlike(timed, lost) is timed


def test_fp8_that_was_left_is_said_before_what_differs_by_it():
    left = Decision(C.FP8_LOST, Verdict.FAIL, "FP8 ran in step 0 and not in step 3", question="loss")
    assert unless_unlike(left, ledgers(operators={**HEALTHY.operators, "": {"abs bfloat16": 1}})) is left
