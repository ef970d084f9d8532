"""Two ledgers compared: each fact that differs is named, with what it means; what FP8 explains is not."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from helpers.evidence import UPDATES, WEIGHT, arm_ledger, sketch, verdict_of
from pytest_fp8.questions.layers.products import Product
from pytest_fp8.questions.ledger.compare import blame_in_ledger, compare, find_in_ledger, unless_unlike
from pytest_fp8.questions.ledger.differences import outermost
from pytest_fp8.questions.ledger.evidence import (
    NO_UPDATES,
    Draw,
    Entered,
    ModuleCalls,
    OptimizerNote,
    OwnedProduct,
    TensorNote,
    TwoLedgers,
)
from pytest_fp8.verdicts import Decision, Verdict

HEALTHY = arm_ledger()
TF32 = "torch.backends.cuda.matmul.allow_tf32"
IN_FLOAT32 = {"mul float32": 2, "rsqrt float32": 1}
GIVEN = HEALTHY.batch[0]
DRAW = Draw("forward", "norm", "native_dropout", [48, 64], "s1")


def ledgers(backend="torchao", reference=None, **changes):
    return TwoLedgers(reference or HEALTHY, arm_ledger(**changes), backend)


def entered(*tensors, phase="forward"):
    return [Entered("", phase, True, True, list(tensors))]


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
    digests, sketches = dict(UPDATES.digests), dict(UPDATES.sketches)
    digests["q.weight"], sketches["q.weight"] = "2", sketch(*moved)
    return replace(UPDATES, digests=digests, sketches=sketches, **changes)


def head(kind="bfloat16", rows=48):
    return [OwnedProduct("lm_head", Product("forward", 256, (rows, 512), kind, "mm"))]


DIFFERENCES = [
    ({"after": weights(digest="2")}, "FAIL", "changed the values", "q.weight"),
    ({"after": weights(dtype="float32")}, "FAIL", "another dtype", "float32"),
    ({"after": weights(shape=[64, 80])}, "FAIL", "another shape", "64x80"),
    ({"after": weights(trained=False)}, "FAIL", "a trained weight is frozen", "q.weight"),
    ({"after": {n: w for n, w in HEALTHY.after.items() if n != "q.weight"}}, "FAIL", "are gone", "q.weight"),
    ({"optimizer": optimizer(members={"q.weight": 0, "up.weight": 0})}, "FAIL", "in no optimizer", "lm_head.weight"),
    ({"calls": without("up")}, "FAIL", "never called, which the reference calls", "up"),
    ({"gradients": ["lm_head.weight", "q.weight"]}, "FAIL", "get no gradient", "up.weight"),
    (
        {"before": weights(digest="2"), "after": weights(digest="2")},
        "INVALID",
        "do not build the same model",
        "q.weight",
    ),
    ({"entered": entered(replace(GIVEN, shape=[24, 64]))}, "INVALID", "what enters the model", "24x64"),
    ({"entered": entered(replace(GIVEN, dtype="float32"))}, "INVALID", "what enters the model", "float32"),
    ({"entered": [*HEALTHY.entered] * 2}, "INVALID", "outermost module calls", "the model x2"),
    ({"calls": call("norm", training=False)}, "INVALID", "train or eval mode of norm", "eval"),
    ({"calls": call("norm", shape=[24, 64])}, "INVALID", "calls of norm", "24x64"),
    ({"calls": without("norm")}, "INVALID", "calls of norm", "never called"),
    ({"backward": 2}, "INVALID", "backward passes", "2"),
    ({"stepped": 2}, "INVALID", "optimizer steps", "2"),
    ({"products": head("float32")}, "INVALID", "another precision outside FP8", "float32"),
    ({"products": head(rows=24)}, "INVALID", "matrix products of lm_head", "24x256x512"),
    ({"operators": {**HEALTHY.operators, "norm": {}}}, "INVALID", "operators of norm", "none of them"),
    (
        {"operators": {**HEALTHY.operators, "norm": {"mul float32": 2, "rsqrt float32": 1}}},
        "INVALID",
        "precision",
        "norm",
    ),
    ({"waits": {"forward norm": 1}}, "INVALID", "the FP8 arm waits", "norm"),
    ({"norm_kept": 0.2}, "INVALID", "clipped or scaled in one arm", "0.2"),
    ({"loss_dtype": "bfloat16"}, "INVALID", "the loss", "bfloat16"),
    ({"random": "other"}, "INVALID", "other random numbers", "another state"),
    ({"random": "other", "draws": [DRAW]}, "INVALID", "other random numbers", "native_dropout of 48x64 by norm"),
    (
        {"switches": {**HEALTHY.switches, TF32: "True"}},
        "INVALID",
        "allow_tf32",
        "True",
    ),
    ({"switches": {**HEALTHY.switches, "autocast on cuda": "torch.bfloat16"}}, "INVALID", "autocast", "bfloat16"),
    ({"optimizer": optimizer(groups=[{"lr": "0.002"}])}, "INVALID", "lr of lm_head.weight", "0.002"),
    ({"optimizer": optimizer(kind="SGD")}, "INVALID", "its class", "SGD"),
    ({"optimizer": optimizer(schedule={"class": "StepLR"})}, "INVALID", "the schedule's class", "StepLR"),
    ({"updates": updates(1.2, -2.0, 2.0)}, "INVALID", "the optimizer's own rule differs", "q.weight"),
    ({"entered": entered(replace(GIVEN, digest="else"))}, "INVALID", "made of the same batch", "else"),
]


@pytest.mark.parametrize(("changes", "verdict", "headline", "seen"), DIFFERENCES)
def test_a_difference_is_named_with_what_it_means(changes, verdict, headline, seen):
    found = find_in_ledger(ledgers(**changes), "layers" if "entered" not in changes else "loss")
    assert found is not None
    assert found[0] == Verdict(verdict)
    assert headline in found[1]["headline"]
    assert seen in found[1]["headline"] + found[1]["seen"]
    assert all(found[1][line] for line in ("expected", "cause", "next_step"))


def test_numbers_of_several_ranks_are_told_as_such():
    both = TwoLedgers(*(arm_ledger(backward=n, elsewhere=[HEALTHY.calls]) for n in (4, 5)), "torchao")
    found = find_in_ledger(both, "layers")
    assert found is not None
    assert "backward passes in a step, of 2 ranks together" in found[1]["headline"]
    assert "optimizer steps in a step, of" not in str(found)


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


def test_where_numerics_fail_on_other_work_that_is_said_first():
    failed = Decision("numerics", Verdict.FAIL, "2 of 3 gradients differ", seen="0.76 times BF16's")
    blamed = blame_in_ledger(failed, ledgers(operators={"": {"nll_loss_forward float32 2,-100": 1}}))
    verdict_of(blamed, Verdict.FAIL, "do not do the same work", "2 of 3 gradients differ", "0.76 times")
    assert blame_in_ledger(failed, ledgers()) is failed


def test_swapped_weights_are_called_so():
    before = {name: replace(weight, digest=name) for name, weight in HEALTHY.before.items()}
    one, two = list(before)[:2]
    after = {**before, one: replace(before[one], digest=two), two: replace(before[two], digest=one)}
    found = find_in_ledger(
        ledgers(reference=arm_ledger(before=before, after=before), before=before, after=after), "layers"
    )
    assert found is not None
    assert f"swapped weights: {one} has what was {two}'s" in found[1]["cause"]


def test_equal_arms_have_none():
    assert compare(ledgers()) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"waits": {"forward q": 3}},
        {"operators": {**HEALTHY.operators, "q": {"amax float32": 2}}},
        {"products": [*head(), OwnedProduct("q", Product("forward", 64, (48, 64), "fp8", "mm"))]},
        {"calls": [*call("q", dtype="float8"), ModuleCalls("q.cast", "forward", [48, 64], "bfloat16", True, False, 2)]},
        {"after": {**HEALTHY.after, "q.scale": replace(WEIGHT, buffer=True)}},
        {"after": weights(dtype="uint8", digest="")},
    ],
)
def test_what_fp8_explains_is_no_difference(changes):
    assert compare(ledgers(**changes)) == []


def test_a_tie_that_the_conversion_breaks_is_named():
    tied = {**HEALTHY.before, "lm_head.weight": replace(WEIGHT, same_as="q.weight")}
    [found] = compare(ledgers(reference=arm_ledger(before=tied, after=tied), before=tied))
    assert (found.verdict, found.what) == (Verdict.FAIL, "lm_head.weight")
    assert "untied" in found.cause


def test_a_hook_that_the_conversion_takes_from_a_parameter_is_named():
    before = {**HEALTHY.before, "q.weight": replace(WEIGHT, hooks=1)}
    assert compare(ledgers(reference=arm_ledger(before=before), before=before, after=before)) == []
    (found,) = compare(ledgers(reference=arm_ledger(before=before), before=before))
    assert (found.verdict, found.what) == (Verdict.FAIL, "q.weight")
    assert "a hook on a parameter is gone" in found.headline


def test_rows_that_a_router_chooses_may_differ():
    routed = [*HEALTHY.calls, ModuleCalls("expert", "forward", [16, 64], "bfloat16", True, True, 1)]
    products = [*head(), OwnedProduct("expert", Product("forward", 64, (16, 64), "bfloat16", "mm"), routed=True)]
    reference = arm_ledger(calls=routed, products=products)
    assert compare(ledgers(reference=reference, random="other", gradients=["q.weight"])) == []
    assert compare(ledgers(reference=reference, calls=without("norm"))) != [], "all else is still compared"


@pytest.mark.parametrize("routed", [True, False])
def test_a_converted_layer_may_rest_where_a_router_gives_it_no_rows(routed):
    one = ModuleCalls("q", "forward", [48, 64], "bfloat16", True, routed, 1)
    found = compare(ledgers(reference=arm_ledger(calls=[*without("q"), one]), calls=without("q")))
    assert any("never called" in each.headline for each in found) is not routed


def test_updates_that_are_no_plain_numbers_are_not_compared():
    unread = replace(UPDATES, digests={**UPDATES.digests, "q.weight": ""}, sketches={**UPDATES.sketches})
    other = replace(UPDATES, sketches={**UPDATES.sketches, "q.weight": sketch(9.0, 9.0, 9.0)})
    assert compare(ledgers(reference=arm_ledger(updates=other), updates=unread)) == []
    assert compare(ledgers(reference=arm_ledger(updates=unread), updates=other)) == []


def test_operators_of_modules_that_cannot_be_told_apart_are_not_compared():
    more = {**HEALTHY.operators, "norm": IN_FLOAT32}
    assert compare(ledgers(uncertain=True, operators=more)) == []


def test_what_differs_behind_what_is_alike_is_found():
    (found,) = compare(ledgers(operators={**HEALTHY.operators, "": {"abs bfloat16": 1}}))
    assert "operators of the model itself" in found.headline


def test_autocast_is_accelerates_own():
    changes = {
        "switches": {**HEALTHY.switches, "autocast on cuda": "torch.bfloat16"},
        "operators": {**HEALTHY.operators, "norm": IN_FLOAT32},
        "products": head("float32"),
        "loss_dtype": "bfloat16",
    }
    assert compare(ledgers("accelerate_te", **changes)) == []
    assert len(compare(ledgers("transformer_engine", **changes))) == 4


def test_other_data_concerns_the_loss_alone():
    other = ledgers(entered=entered(replace(GIVEN, digest="other")), batch=[replace(GIVEN, digest="other")])
    assert find_in_ledger(other, "loss")[1]["headline"] == "the arms trained on different data"
    assert find_in_ledger(other, "speedup") is None
    assert find_in_ledger(other, "layers") is None


def test_a_tensor_that_the_model_computed_is_compared_by_its_shape():
    computed = TensorNote([48, 64], "bfloat16", "")
    assert compare(ledgers(reference=arm_ledger(entered=entered(computed)), entered=entered(computed))) == []


def test_a_decision_about_arms_that_do_other_work_is_invalid():
    decision = Decision("speedup", Verdict.PASS, "1.96x", numbers={"ratio": 1.96})
    halved = ledgers(entered=entered(replace(GIVEN, shape=[24, 64])))
    verdict_of(unless_unlike(decision, halved), Verdict.INVALID, "other work in one arm", "24x64")
    assert unless_unlike(decision, halved).numbers == {"ratio": 1.96}
    assert unless_unlike(decision, ledgers()) is decision
    broken = ledgers(after=weights(digest="2"))
    assert unless_unlike(decision, broken) is decision, "the layers question reports what the conversion broke"
    disturbed = Decision("speedup", Verdict.INVALID, "another process used the GPU")
    assert unless_unlike(disturbed, halved) is disturbed


@pytest.mark.parametrize("members", [{}, {"q.weight": 0, "up.weight": 0}])
@pytest.mark.parametrize("seen", [Verdict.PASS, Verdict.FAIL, Verdict.INVALID])
def test_weights_that_no_optimizer_steps_fail_the_loss_whatever_its_curves_say(members, seen):
    lost = ledgers(optimizer=optimizer(members=members))
    decision = unless_unlike(Decision("loss", seen, "the curves"), lost)
    verdict_of(decision, Verdict.FAIL, "in no optimizer", "never stepped: lm_head.weight")
    timed = Decision("speedup", Verdict.PASS, "1.96x")
    assert unless_unlike(timed, lost) is timed


@pytest.mark.parametrize(
    ("after", "cause"),
    [
        (HEALTHY.after, "the optimizer was made before the conversion"),
        (weights(trained=False), "forgot that they were trained"),
        ({name: weight for name, weight in HEALTHY.after.items() if name != "q.weight"}, "the conversion dropped them"),
    ],
)
def test_why_no_optimizer_steps_a_weight_is_told_by_what_the_conversion_made_of_it(after, cause):
    lost = ledgers(after=after, optimizer=optimizer(members={"up.weight": 0, "lm_head.weight": 0}))
    decision = unless_unlike(Decision("loss", Verdict.PASS, "the curves"), lost)
    verdict_of(decision, Verdict.FAIL, "never stepped: q.weight", cause)


def test_groups_may_be_split_otherwise():
    split = OptimizerNote("AdamW", [{"lr": "0.001"}] * 2, {"q.weight": 0, "up.weight": 1, "lm_head.weight": 1})
    assert compare(ledgers(optimizer=split)) == []


@pytest.mark.parametrize(
    ("phase", "cause"),
    [("forward", "the generator was seeded again inside the step"), ("recompute", "it does not restore the generator")],
)
def test_the_first_draw_from_another_state_is_named(phase, cause):
    first, second = replace(DRAW, phase=phase), replace(DRAW, phase=phase, owner="up", state="s2")
    (found,) = compare(
        ledgers(reference=arm_ledger(draws=[first, second]), draws=[first, replace(second, state="s3")], random="other")
    )
    assert cause in found.cause
    assert "by up" in found.fp8
    assert "draw 2 of 2: from another state of the generator" in found.fp8


def test_a_number_that_one_arm_does_not_tell_is_no_difference():
    def norm(*operators):
        return {**HEALTHY.operators, "norm": dict.fromkeys(operators, 1)}

    reference = arm_ledger(operators=norm("native_layer_norm bfloat16 1e-05"))
    assert compare(ledgers(reference=reference, operators=norm("native_layer_norm bfloat16"))) == []
    (found,) = compare(ledgers(reference=reference, operators=norm("native_layer_norm bfloat16 0.02")))
    assert "the epsilon of a norm" in found.cause
    said, unsaid = {"": {"abs bfloat16": 1}}, norm("native_layer_norm bfloat16")
    (found,) = compare(ledgers(reference=reference, operators={**unsaid, **said}))
    assert "operators of the model itself" in found.headline, "what comes after it is compared all the same"


def test_a_matrix_product_that_the_fp8_arm_alone_runs_is_named():
    more = OwnedProduct("norm", Product("forward", 64, (48, 64), "bfloat16", "mm"))
    (found,) = compare(ledgers(products=[*HEALTHY.products, more]))
    assert found.verdict is Verdict.INVALID
    assert "matrix products of norm" in found.headline
    (found,) = compare(ledgers(reference=arm_ledger(products=[*HEALTHY.products, more])))
    assert "matrix products of norm" in found.headline


@pytest.mark.parametrize(("backend", "named"), [("torchao", True), ("te_fused", False)])
def test_attention_of_one_arm_alone_is_named(backend, named):
    here, there = ({**HEALTHY.switches, "flash_sdp_enabled": on} for on in ("True", "False"))
    found = compare(ledgers(backend, reference=arm_ledger(switches=here), switches=there))
    assert ["flash_sdp_enabled" in one.headline for one in found] == [True] * named


def test_outermost_names_lie_inside_no_other():
    assert outermost(["b.c", "a", "a.b.c", "ab", "b.c.d", "a.b"]) == ["a", "ab", "b.c"]
    assert outermost(["a", ""]) == [""]


def test_fp8_that_was_left_is_said_before_what_differs_by_it():
    left = Decision("loss", Verdict.FAIL, "FP8 ran in step 0 and not in step 3", numbers={"named": True})
    assert unless_unlike(left, ledgers(operators={**HEALTHY.operators, "": {"abs bfloat16": 1}})) is left
