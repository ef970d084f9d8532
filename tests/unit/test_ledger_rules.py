"""Two ledgers compared: each fact that differs is named; what FP8 explains, or a router decides, is no difference."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from helpers.evidence import CASE, UPDATES, WEIGHT, arm_ledger, layers_evidence, sketch, verdict_of
from pytest_fp8.codes import C, D, L, N
from pytest_fp8.questions.layers.check import check_layers
from pytest_fp8.questions.layers.products import Product
from pytest_fp8.questions.ledger.compare import (
    blame_in_ledger,
    compare,
    evaluated_otherwise,
    find_in_ledger,
    unless_unlike,
)
from pytest_fp8.questions.ledger.evidence import (
    Collective,
    Draw,
    Entered,
    ModuleCalls,
    OwnedProduct,
    TensorNote,
    TwoLedgers,
)
from pytest_fp8.verdicts import Decision, Verdict

HEALTHY = arm_ledger()
IN_FLOAT32 = {"mul float32": 2, "rsqrt float32": 1}
GIVEN = HEALTHY.batch[0]
REDUCED = Collective("backward", "reduce-scatter", "float32", 4096, 2)
DRAW = Draw("forward", "norm", "native_dropout", [48, 64], "s1")


def ledgers(backend="torchao", reference=None, **changes):
    return TwoLedgers(reference or HEALTHY, arm_ledger(**changes), backend)


def entered(*tensors):
    return [Entered("", "forward", True, True, list(tensors))]


def without(name):
    return [call for call in HEALTHY.calls if call.module != name]


def call(name, **changes):
    return [replace(c, **changes) if c.module == name else c for c in HEALTHY.calls]


def weights(**changes):
    return {**HEALTHY.after, "q.weight": replace(WEIGHT, **changes)}


def optimizer(**changes):
    return replace(HEALTHY.optimizer, **changes)


def updates(*moved, **changes):
    """Those of arms whose ``q.weight`` moved otherwise."""
    return replace(UPDATES, sketches={**UPDATES.sketches, "q.weight": sketch(*moved)}, **changes)


def head(kind="bfloat16"):
    return [OwnedProduct("lm_head", Product("forward", 256, (48, 512), kind, "mm"))]


MEMBERS = HEALTHY.optimizer.members
AGAIN = replace(HEALTHY.calls[2], phase="recompute", outermost=True)


def norm(*operators):
    return {**HEALTHY.operators, "norm": dict.fromkeys(operators, 1)}


EXPERT = [*HEALTHY.calls, ModuleCalls("expert", "forward", [16, 64], "bfloat16", True, 1)]
MATMUL = Product("forward", 64, (16, 64), "bfloat16", "mm")
MORE_PRODUCTS = [*HEALTHY.products, OwnedProduct("norm", MATMUL)]
ROUTED = arm_ledger(
    calls=EXPERT,
    products=[*head(), OwnedProduct("expert", MATMUL)],
    gradients=[*HEALTHY.gradients, "expert.weight"],
    routed=["expert"],
)
UNDER_AUTOCAST = {
    "switches": {**HEALTHY.switches, "autocast on cuda": "torch.bfloat16"},
    "operators": {**HEALTHY.operators, "norm": IN_FLOAT32},
    "products": head("float32"),
    "loss_dtype": "bfloat16",
}
ALIKE = {
    "equal arms": {},
    "an amax that is reduced": {
        "reference": arm_ledger(wire=[REDUCED]),
        "wire": [REDUCED, replace(REDUCED, dtype="float8", bytes=64)],
    },
    "an FP8 layer waits": {"waits": {"q": {"forward": 3}}},
    "a layer of one's own": {
        "fp8_layers": [],
        "products": [*head(), OwnedProduct("q", replace(MATMUL, kind="fp8"))],
        "calls": [*call("q", dtype="float8"), ModuleCalls("q.cast", "forward", [48, 64], "bfloat16", True, 2)],
    },
    "a weight in FP8": {"after": weights(dtype="uint8", digest="")},
    "single values rounded otherwise": {"updates": updates(1.001, -2.0, 2.0)},
    "gradients of another size": {"updates": updates(9.0, 9.0, 9.0, size=1.0)},
    "other steps": {"updates": updates(9.0, 9.0, 9.0, steps=2)},
    "a loss that is not finite": {"updates": updates(1.2, -2.0, 2.0), "loss": math.nan},
    "an expert": {"reference": ROUTED, "random": "other"},
    "a layer that a router gives no rows": {"routed": ["q"], "calls": without("q")},
    "rows of a model that routes": {"routed": [""], "entered": entered(TensorNote([16, 64], "bfloat16"))},
    "operators of a routed module": {"routed": ["norm"], "operators": {**HEALTHY.operators, "norm": IN_FLOAT32}},
    "Accelerate's autocast": {"backend": "accelerate_te", **UNDER_AUTOCAST},
    "a number that one arm does not tell": {
        "reference": arm_ledger(operators=norm("native_layer_norm bfloat16 1e-05")),
        "operators": norm("native_layer_norm bfloat16"),
    },
}


DIFFERENCES = [  # changes of the FP8 arm, code, what the message names
    ({"after": weights(digest="2")}, L.WEIGHT_CHANGED, "q.weight"),
    ({"after": weights(dtype="float32")}, L.WEIGHT_CAST, "float32"),
    ({"after": weights(shape=[64, 80])}, L.WEIGHT_RESHAPED, "64x80"),
    ({"after": weights(trained=False)}, L.FREEZES_TRAINED, "q.weight"),
    ({"after": {n: w for n, w in HEALTHY.after.items() if n != "q.weight"}}, L.WEIGHT_GONE, "q.weight"),
    ({"optimizer": optimizer(members={**MEMBERS, "more": 0})}, D.OTHER_WEIGHTS_TRAINED, "more"),
    ({"before": weights(digest="2"), "after": weights(digest="2")}, D.OTHER_MODEL, "q.weight"),
    ({"entered": [*HEALTHY.entered] * 2}, D.OTHER_WORK, "2: the model"),
    ({"entered": [replace(HEALTHY.entered[0], gradients=False)]}, D.OTHER_MODE, "off"),
    ({"calls": call("norm", training=False)}, D.OTHER_MODE, "eval"),
    ({"backward": 2}, D.OTHER_PASSES, "2"),
    ({"stepped": 2}, D.OTHER_PASSES, "2"),
    ({"products": head("float32")}, D.OTHER_PRECISION, "float32"),
    ({"waits": {"norm": {"forward": 1}}}, D.OTHER_WAITS, "norm"),
    ({"norm_kept": 0.2}, D.OTHER_CLIPPING, "0.2"),
    ({"reference": arm_ledger(wire=[REDUCED]), "wire": [replace(REDUCED, dtype="bf16")]}, D.OTHER_PRECISION, "bf16"),
    ({"loss_dtype": "bfloat16"}, D.OTHER_PRECISION, "bfloat16"),
    ({"random": "other"}, D.OTHER_RANDOM_NUMBERS, "state other"),
    ({"random": "other", "draws": [replace(DRAW, owner="q"), DRAW]}, D.OTHER_RANDOM_NUMBERS, "by norm"),
    ({"switches_after": {}}, D.OTHER_SWITCH, "none"),
    ({"optimizer": optimizer(groups=[{"lr": "0.002"}])}, D.OTHER_OPTIMIZER, "0.002"),
    ({"optimizer": optimizer(kind="SGD")}, D.OTHER_OPTIMIZER, "SGD"),
    ({"optimizer": optimizer(schedule={"class": "StepLR"})}, D.OTHER_OPTIMIZER, "StepLR"),
    ({"updates": updates(1.2, -2.0, 2.0)}, D.OTHER_UPDATES, "q.weight"),
    ({"batch": [replace(GIVEN, digest="else")]}, D.OTHER_DATA, "other values"),
    ({"recomputed_otherwise": ["q"]}, D.RECOMPUTED_OTHERWISE, "q"),
    ({"calls": [*HEALTHY.calls, AGAIN]}, D.OTHER_RECOMPUTATION, "recomputed"),
    # What a model that routes, or an arm under autocast, does not explain.
    ({"reference": ROUTED, "gradients": ["q.weight"]}, L.NO_GRADIENT, "up.weight"),
    ({"routed": [""], "entered": entered(replace(GIVEN, digest="other"))}, D.OTHER_INPUTS, "other values"),
    ({"reference": ROUTED, "calls": without("norm")}, D.OTHER_WORK, "none of them"),
    ({"routed": ["q"], "operators": {**HEALTHY.operators, "norm": IN_FLOAT32}}, D.OTHER_PRECISION, "norm"),
    (
        {
            "reference": arm_ledger(operators=norm("native_layer_norm bfloat16 1e-05")),
            "operators": norm("native_layer_norm bfloat16 0.02"),
        },
        D.OTHER_OPERATOR_SETTING,
        "0.02",
    ),
    ({"products": MORE_PRODUCTS}, D.OTHER_WORK, "norm"),
    ({"reference": arm_ledger(products=MORE_PRODUCTS)}, D.OTHER_WORK, "norm"),
    ({"backend": "transformer_engine", **UNDER_AUTOCAST}, D.OTHER_SWITCH, "bfloat16"),
    ({"calls": without("q")}, L.PASSED_BY, "q"),
]


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


@pytest.mark.parametrize("name", ALIKE)
def test_what_fp8_explains_or_a_router_decides_is_no_difference(name):
    assert compare(ledgers(**ALIKE[name])) == []


def test_arms_may_evaluate_with_other_layers_and_not_be_timed_with_other_evaluations():
    evaluated = [replace(one, phase="evaluation", training=False) for one in HEALTHY.calls]
    swapped = [replace(one, module="(Linear 1)") if one.module == "q" else one for one in evaluated]
    both = ledgers(reference=arm_ledger(calls=[*HEALTHY.calls, *evaluated]), calls=[*HEALTHY.calls, *swapped])
    assert compare(both) == []
    assert evaluated_otherwise(both) == ["(Linear 1)", "q"]
    assert evaluated_otherwise(ledgers(calls=[*HEALTHY.calls, *evaluated])) == [], "one arm was not watched there"
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


# -- what two ledgers that differ make of a question's decision -------------------------------------------------------

CODE = C.HIGHER
"""Any code."""


@pytest.mark.parametrize(
    ("code", "told"), [(N.OTHER_GRADIENT, D.OTHER_WORK), (N.GRADIENT_REPLACED, N.GRADIENT_REPLACED)]
)
def test_other_work_explains_gradients_that_differ_from_bf16s_and_nothing_else(code, told):
    failed = Decision(code, Verdict.FAIL, "2 of 3 gradients differ", seen="0.76 times BF16's", question="numerics")
    blamed = blame_in_ledger(failed, ledgers(operators={"": {"nll_loss_forward float32 2,-100": 1}}))
    assert (blamed.code, blamed.verdict) == (told, Verdict.FAIL)
    assert "0.76 times" in blamed.seen
    assert "operators of" in blamed.seen + blamed.headline
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


def test_a_recomputation_that_differs_in_the_reference_alone_is_no_comparison():
    otherwise = arm_ledger(recomputed_otherwise=["q"])
    for question in ("layers", "loss"):
        found = find_in_ledger(ledgers(reference=otherwise), question)
        assert (found.verdict, found.code) == (Verdict.INVALID, D.RECOMPUTED_OTHERWISE)
    both = ledgers(reference=otherwise, recomputed_otherwise=["q"])
    verdict_of(check_layers(CASE, layers_evidence(), ledgers=both), Verdict.PASS, "in both arms: q")
