"""The layers question's check on evidence written by hand: healthy, and broken in each way that it must name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers.evidence import CASE, SIZES, arm_ledger, layers_evidence, verdict_of
from pytest_fp8 import Case, Verdict
from pytest_fp8.questions.layers.check import check_layers, counted
from pytest_fp8.questions.layers.products import FP8, Product
from pytest_fp8.questions.ledger.evidence import TwoLedgers

HP = Case("1b", "torchao", "rowwise_with_gw_hp")
RECIPE = {"recipe": "delayed", **CASE.full_options}


def test_layers_healthy():
    decision = check_layers(CASE, layers_evidence())
    verdict_of(decision, Verdict.PASS, "2 of 3 Linears")
    assert decision.numbers["roles"]["wgrad"] == {"expected": 2, "fp8": 2}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"converted": [], "live_fp8": [], "skipped": dict.fromkeys(SIZES, "size: odd")}, "no layer was converted"),
        ({"live_fp8": ["q"]}, "not FP8: up"),
        ({"live_fp8": ["q", "up", "lm_head"]}, "lm_head left alone (head)"),
        ({"skipped": {}}, "neither converted nor left with a reason"),
        ({"dropped_behaviour": {"q": "a forward hook"}}, "q: a forward hook"),
        ({"recipes": {"q": {"recipe": "off"}}}, "FP8 was off inside the forward pass"),
        ({"recipes": {"q": {**RECIPE, "amax_compute_algo": "most_recent"}}}, "amax_compute_algo=max"),
        ({"calls": []}, "keeps references to the unconverted modules"),
        ({"calls": [], "products": []}, "does not call the model that it is given"),
    ],
)
def test_layers_broken(changes, says):
    verdict_of(check_layers(CASE, layers_evidence(**changes)), Verdict.FAIL, says)


@pytest.mark.parametrize("role", ["fprop", "dgrad", "wgrad"])
def test_converted_but_not_executed_names_role_and_layer(role):
    decision = check_layers(CASE, layers_evidence(bf16=[("up", role)]))
    verdict_of(decision, Verdict.FAIL, f"{role} of 1 of 2 layers", "bfloat16: up")
    assert f"read the layer's {'forward' if role == 'fprop' else 'backward'}" in decision.next_step


def test_layers_that_are_off_in_one_of_two_micro_batches_are_told_as_calls():
    first, off = layers_evidence(), layers_evidence(bf16=[("q", "fprop"), ("up", "fprop")])
    calls = [*first.calls, *(replace(call, turn=1) for call in first.calls)]
    decision = check_layers(CASE, replace(first, calls=calls, products=[*first.products, *off.products]))
    verdict_of(decision, Verdict.FAIL, "fprop of 2 of 4 calls", "the first micro-batch alone")


@pytest.mark.parametrize(
    ("gradients", "says"), [(["q.weight"], "lm_head.weight, up.weight"), (None, "dgrad of 1 of 2")]
)
def test_a_branch_that_is_cut_off_is_named_and_not_a_layer_whose_products_are_missed(gradients, says):
    """``up`` is cut off, and the one dgrad of two layers of equal sizes may be anybody's."""
    healthy = layers_evidence()
    absent = [p for p in healthy.products if p.phase == "forward" or p.extents != healthy.calls[0].expected("dgrad")]
    ledgers = TwoLedgers(arm_ledger(), arm_ledger(**({"gradients": gradients} if gradients else {})), "torchao")
    decision = check_layers(CASE, layers_evidence(products=absent), ledgers=ledgers)
    verdict_of(decision, Verdict.FAIL, says)
    assert ("cut off from the loss" in decision.cause) == bool(gradients)


def test_a_forward_pass_in_high_precision_is_said_before_missing_gradients():
    ledgers = TwoLedgers(arm_ledger(), arm_ledger(gradients=["q.weight"]), "torchao")
    decision = check_layers(CASE, layers_evidence(bf16=[("up", "fprop")]), ledgers=ledgers)
    verdict_of(decision, Verdict.FAIL, "fprop of 1 of 2 layers")


def test_an_fp8_operator_on_a_bf16_kernel_is_not_fp8():
    decision = check_layers(CASE, layers_evidence(kernel="bf16_kernel_1x1"))
    verdict_of(decision, Verdict.FAIL, "fprop of 2 of 2 layers", "bfloat16 kernel")


def test_a_kernel_of_no_learned_family_is_inconclusive():
    verdict_of(
        check_layers(CASE, layers_evidence(kernel="cute_1x1")), Verdict.INCONCLUSIVE, "no learned family", "cute"
    )


def test_a_recipe_that_keeps_wgrad_in_high_precision_is_held_to_it():
    both = [("q", "wgrad"), ("up", "wgrad")]
    verdict_of(check_layers(HP, layers_evidence(bf16=both, case=HP)), Verdict.PASS)
    verdict_of(check_layers(HP, layers_evidence(case=HP)), Verdict.FAIL, "wgrad ran in FP8 although")


def test_less_fp8_than_in_the_baseline_fails():
    verdict_of(check_layers(CASE, layers_evidence(), baseline_share=[0.9]), Verdict.FAIL, "less of the step")


@pytest.mark.parametrize(("count", "says"), [("fp8_layers", "Linears"), ("fp8_dgrad", "dgrad products")])
def test_counts_are_exact(count, says):
    kept = {"fp8_layers": 2, "fp8_fprop": 2, "fp8_dgrad": 2, "fp8_wgrad": 2}
    assert counted(check_layers(CASE, layers_evidence()).numbers) == kept
    verdict_of(check_layers(CASE, layers_evidence(), baseline_counts=kept), Verdict.PASS)
    more = {**kept, count: 3}
    verdict_of(check_layers(CASE, layers_evidence(), baseline_counts=more), Verdict.FAIL, f"fewer {says}", "exactly")


@pytest.mark.parametrize(
    ("switches", "says"),
    [
        ({"asked": "fp8", "accelerate": ""}, "nothing in this program reads it"),
        ({"asked": "fp8", "accelerate": "bf16"}, "bf16=True of the Trainer wins over it"),
        ({"asked": "fp8", "accelerate": "fp8"}, "prepare() was not given this model"),
        ({}, "FP8 was asked for where nothing reads it"),
    ],
)
def test_nothing_converted_names_who_dropped_it(switches, says):
    verdict_of(check_layers(CASE, layers_evidence(live_fp8=[], switches=switches)), Verdict.FAIL, says)


def test_another_librarys_layers_are_named_as_such():
    kinds = dict.fromkeys(SIZES, "torchao.float8.float8_linear.Float8Linear")
    decision = check_layers(CASE, layers_evidence(live_fp8=[], kinds=kinds))
    verdict_of(decision, Verdict.FAIL, "another library's: torchao", "both libraries are installed")


def test_eval_mode_is_the_cause_only_where_layers_are_in_it():
    off = [(name, "fprop") for name in ("q", "up")]
    verdict_of(check_layers(CASE, layers_evidence(bf16=off, in_eval=["q"])), Verdict.FAIL, "eval() switched FP8 off: 1")
    assert "eval()" not in check_layers(CASE, layers_evidence(bf16=off)).message


def test_an_amax_history_that_stands_still_is_named():
    decision = check_layers(CASE, layers_evidence(stale_amax=["q", "up"]))
    verdict_of(decision, Verdict.FAIL, "amax history of 2 layers does not change", "never updated")


def test_recomputation_that_torch_ended_early_is_no_finding():
    case = Case("1b", "torchao", "tensorwise", activation_checkpointing=True)
    healthy = layers_evidence(case=case, recompute=True)
    calls = healthy.calls
    again = [
        Product("recompute", *c.expected("fprop")[1:], FP8, "mm", "fp8_kernel_1x1") for c in calls if c.name == "q"
    ]
    evidence = replace(healthy, products=[*healthy.products, *again])
    verdict_of(check_layers(case, evidence), Verdict.PASS)
    broken = [replace(product, kind="bfloat16") for product in again]
    decision = check_layers(case, replace(evidence, products=[*healthy.products, *broken]))
    verdict_of(decision, Verdict.FAIL, "recompute of 1 of 2 layers", "outside the precision context")
