"""Two ledgers compared: each fact that differs is named, with what it means."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers.evidence import WEIGHT, arm_ledger
from helpers.two_ledgers import DRAW, GIVEN, HEALTHY, call, entered, head, ledgers, optimizer, updates, weights, without
from pytest_fp8.questions.layers.products import Product
from pytest_fp8.questions.ledger.compare import compare, find_in_ledger
from pytest_fp8.questions.ledger.differences import outermost
from pytest_fp8.questions.ledger.evidence import OwnedProduct, TwoLedgers
from pytest_fp8.verdicts import Verdict

TF32 = "torch.backends.cuda.matmul.allow_tf32"


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


def test_swapped_weights_are_called_so():
    before = {name: replace(weight, digest=name) for name, weight in HEALTHY.before.items()}
    one, two = list(before)[:2]
    after = {**before, one: replace(before[one], digest=two), two: replace(before[two], digest=one)}
    found = find_in_ledger(
        ledgers(reference=arm_ledger(before=before, after=before), before=before, after=after), "layers"
    )
    assert found is not None
    assert f"swapped weights: {one} has what was {two}'s" in found[1]["cause"]


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


def test_what_differs_behind_what_is_alike_is_found():
    (found,) = compare(ledgers(operators={**HEALTHY.operators, "": {"abs bfloat16": 1}}))
    assert "operators of the model itself" in found.headline


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
