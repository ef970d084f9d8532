"""The layers question's check on evidence written by hand: healthy, and broken in each way that it must name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers.evidence import CASE, SIZES, arm_ledger, layers_evidence, verdict_of
from pytest_fp8 import Case, Verdict
from pytest_fp8.codes import L, P
from pytest_fp8.questions.layers.check import AS_IT_RUNS, check_layers, strictly
from pytest_fp8.questions.layers.products import FP8, LayerCall, Product
from pytest_fp8.questions.ledger.evidence import Collective, TwoLedgers
from pytest_fp8.recipes import ROLES, Reason, Stays

HP = Case("1b", "torchao", "rowwise_with_gw_hp")
RECIPE = {"recipe": "delayed", **CASE.full_options}


def in_bf16(*names):
    """The products and calls of an arm in which these layers are not FP8."""
    healthy = layers_evidence(bf16=[(name, role) for name in names for role in ROLES])
    calls = [replace(call, fp8=call.fp8 and call.name not in names) for call in healthy.calls]
    return {"products": healthy.products, "calls": calls}


def nothing(skipped=None):
    return {"converted": [], "live_fp8": [], "skipped": skipped or {}, **in_bf16("q", "up")}


def test_layers_healthy():
    decision = check_layers(CASE, layers_evidence())
    verdict_of(decision, Verdict.PASS, "2 of 3 Linears")
    assert decision.numbers["roles"]["wgrad"] == {"expected": 2, "fp8": 2}


def with_function(gradients=FP8):
    """A healthy arm with a function of the user's own in FP8, and its gradients of this kind."""
    call, healthy = LayerCall("mix (64 to 128)", 64, 128, 48, fp8=True, by="mix"), layers_evidence()
    kinds = {"fprop": FP8, "dgrad": gradients, "wgrad": gradients}
    ran = {role: Product(*call.expected(role), kinds[role], "_scaled_mm", "fp8_kernel_1x1") for role in ROLES}
    calls = [*healthy.calls, replace(call, ran=ran)]
    return {"calls": calls, "products": [*healthy.products, *ran.values()]}


IN_EVALUATION = {"products": [Product("evaluation", 64, (48, 128), FP8, "mm", "fp8_kernel_1x1")]}
SIZE, LEFT, EDGE = Reason(Stays.SIZE, "odd"), Reason(Stays.LEFT, "the workload leaves '*'"), Reason(Stays.EDGE, "first")


@pytest.mark.parametrize(
    ("changes", "code", "says"),
    [
        (nothing(), L.NOTHING_CONVERTED, "3 Linears could be FP8"),
        ({**nothing(), "kinds": dict.fromkeys(SIZES, "torchao.float8.Linear")}, L.OTHER_LIBRARY, "torchao.float8"),
        ({"live_fp8": ["q", "up", "lm_head"]}, L.LEFT_AND_CONVERTED, "FP8: lm_head"),
        ({"dropped_behaviour": {"q": "a forward hook"}}, L.LOST_BEHAVIOUR, "q: a forward hook"),
        ({"skipped": {}}, L.UNACCOUNTED, "no reason: lm_head"),
        ({"recipes": {"q": {"recipe": "off"}}}, L.FP8_OFF, "off, in q"),
        ({"bf16": [("up", "wgrad")]}, L.WGRAD_NOT_IN_FP8, "1 in FP8; bfloat16: up"),
        ({"stale_amax": ["q", "up"]}, L.STALE_AMAX, "unchanged: q, up"),
        ({**nothing(), **IN_EVALUATION}, L.NO_FORWARD_IN_FP8, "evaluation: 1 FP8 products"),
        ({**with_function("bfloat16")}, L.GRADIENTS_NOT_IN_FP8, "bfloat16: mix"),
        (nothing(dict.fromkeys(SIZES, SIZE)), L.NOTHING_CONVERTED, "size: odd"),
        (nothing({"q": SIZE, "up": LEFT, "lm_head": LEFT}), L.NOTHING_CONVERTED, "size: odd"),
        # What a conversion of the user's own left without a reason was not meant to be left.
        (nothing({"lm_head": LEFT}), L.NOTHING_CONVERTED, "2 Linears could be FP8 and are not: q, up"),
        (nothing(dict.fromkeys(SIZES, LEFT)), L.NO_LINEAR_FITS, "filter: the workload leaves"),
        (nothing(dict.fromkeys(SIZES, EDGE)), L.NO_LINEAR_FITS, "the backend torchao converts both"),
        ({**nothing(), "originals": {}}, L.NO_LINEAR_FITS, "no Linear at all"),
        ({"live_fp8": ["q"], **in_bf16("up"), "skipped": {"lm_head": SIZE}}, L.NOT_CONVERTED, "lm_head (size: odd)"),
        ({"recipes": {"q": {**RECIPE, "amax_compute_algo": "most_recent"}}}, L.OTHER_RECIPE, "amax_compute_algo=max"),
        ({"calls": [], "products": []}, L.NEVER_CALLED, "no Linear was called"),
    ],
)
def test_layers_broken(changes, code, says):
    verdict_of(check_layers(CASE, layers_evidence(**changes)), Verdict.FAIL, code, says)


def test_what_is_said_besides():
    verdict_of(check_layers(CASE, layers_evidence(**with_function())), Verdict.PASS, "in FP8 where no Linear is called")
    verdict_of(check_layers(CASE, layers_evidence(kernel="cute_1x1")), Verdict.INCONCLUSIVE, L.UNKNOWN_KERNEL, "cute")
    unmatched = layers_evidence(unmatched=["mlp.*"])
    found = check_layers(CASE, unmatched)
    verdict_of(found, Verdict.PASS, "leave='mlp.*' matches no Linear")
    verdict_of(strictly(found, unmatched), Verdict.FAIL, L.LEAVES_NOTHING, "'mlp.*'")


@pytest.mark.parametrize(("fp8", "code"), [(60_000, None), (100_000, L.GATHERS_BF16)])
def test_weights_that_are_gathered_in_fp8_travel_as_one_byte(fp8, code):
    case = Case("1b", "torchao", "tensorwise", parallel="fsdp2", gpus=2, options={"float8_all_gather": True})
    wire = [[Collective("forward", "all-gather", "bfloat16", size, 1)] for size in (80_000, fp8)]
    arms = TwoLedgers(*(arm_ledger(wire=each) for each in wire), "torchao")
    decision = check_layers(case, layers_evidence(case=case, sharded=["q", "up"]), ledgers=arms)
    assert decision.code is code, decision.message


def test_layers_that_are_off_in_one_of_two_micro_batches_are_told_as_calls():
    first, off = layers_evidence(), layers_evidence(bf16=[("q", "fprop"), ("up", "fprop")])
    calls = [*first.calls, *off.calls]
    decision = check_layers(CASE, replace(first, calls=calls, products=[*first.products, *off.products]))
    verdict_of(decision, Verdict.FAIL, "fprop of 2 of 4 calls", "in some of its calls")


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
    assert decision.code is (L.NO_GRADIENT if gradients else L.DGRAD_NOT_IN_FP8)


def test_a_forward_pass_in_high_precision_is_said_before_missing_gradients():
    ledgers = TwoLedgers(arm_ledger(), arm_ledger(gradients=["q.weight"]), "torchao")
    decision = check_layers(CASE, layers_evidence(bf16=[("up", "fprop")]), ledgers=ledgers)
    verdict_of(decision, Verdict.FAIL, "fprop of 1 of 2 layers")


def test_an_fp8_operator_on_a_bf16_kernel_is_not_fp8():
    decision = check_layers(CASE, layers_evidence(kernel="bf16_kernel_1x1"))
    verdict_of(decision, Verdict.FAIL, "fprop of 2 of 2 layers", "bfloat16 kernel")


def test_a_recipe_that_keeps_wgrad_in_high_precision_is_held_to_it():
    both = [("q", "wgrad"), ("up", "wgrad")]
    verdict_of(check_layers(HP, layers_evidence(bf16=both, case=HP)), Verdict.PASS)
    verdict_of(check_layers(HP, layers_evidence(case=HP)), Verdict.FAIL, L.AGAINST_RECIPE, "wgrad")


@pytest.mark.parametrize(("count", "says"), [("fp8_layers", "Linears"), ("fp8_dgrad", "dgrad products")])
def test_counts_are_exact(count, says):
    kept = {"fp8_layers": 2, "fp8_fprop": 2, "fp8_dgrad": 2, "fp8_wgrad": 2}
    assert check_layers(CASE, layers_evidence()).figures.counted() == kept
    verdict_of(check_layers(CASE, layers_evidence(), baseline_counts=kept), Verdict.PASS)
    more = {**kept, count: 3}
    verdict_of(check_layers(CASE, layers_evidence(), baseline_counts=more), Verdict.FAIL, L.LESS_THAN_BASELINE, says)


@pytest.mark.parametrize(
    ("switches", "code"),
    [
        ({"asked": "fp8", "accelerate": ""}, P.NOTHING_READS_IT),
        ({"asked": "fp8", "accelerate": "bf16"}, P.TRAINER_DECIDES),
        ({"asked": "fp8", "accelerate": "no"}, P.PROGRAM_DECIDES),
        ({"asked": "fp8", "accelerate": "fp8"}, L.NOTHING_CONVERTED),
        ({}, L.NOTHING_CONVERTED),
    ],
)
def test_nothing_converted_names_who_dropped_it(switches, code):
    verdict_of(check_layers(CASE, layers_evidence(**nothing(), switches=switches)), Verdict.FAIL, code)


def test_eval_mode_is_the_cause_only_where_layers_are_in_it():
    off = [(name, "fprop") for name in ("q", "up")]
    verdict_of(check_layers(CASE, layers_evidence(bf16=off, in_eval=["q"])), Verdict.FAIL, "eval() switched FP8 off: 1")
    assert "eval()" not in check_layers(CASE, layers_evidence(bf16=off)).message


def test_recomputation_that_torch_ended_early_is_no_finding():
    case = Case("1b", "torchao", "tensorwise", activation_checkpointing=True)
    healthy = layers_evidence(case=case, again=["q", "up"])
    ended = [p for p in healthy.products if p != healthy.calls[1].ran["recompute"]]
    verdict_of(check_layers(case, replace(healthy, products=ended)), Verdict.PASS)
    broken = [replace(p, kind="bfloat16") if p.phase == "recompute" else p for p in ended]
    decision = check_layers(case, replace(healthy, products=broken))
    verdict_of(decision, Verdict.FAIL, L.RECOMPUTE_NOT_IN_FP8, "recompute of 1 of 2 layers")


def test_what_compiled_code_alone_has_in_bf16_is_told_by_its_size():
    """No hook and no dispatch mode sees whose it is."""
    healthy = layers_evidence()
    alike = [replace(call, name=f"{call.name}{index}") for index in range(6) for call in healthy.calls]
    originals = {call.name: (call.in_features, call.out_features) for call in alike}
    names = [call.name for call in alike if call.fp8]
    heads = {call.name: healthy.skipped["lm_head"] for call in alike if not call.fp8}
    more = {"originals": originals, "converted": names, "live_fp8": names, "skipped": heads, "recipes": {}}
    products = [product for call in alike for product in call.ran.values()]
    evidence = replace(healthy, calls=alike, products=products, **more)
    verdict_of(check_layers(CASE, evidence), Verdict.PASS)
    products[products.index(alike[1].ran["dgrad"])] = replace(alike[1].ran["dgrad"], kind="bfloat16")
    decision = check_layers(CASE, evidence)
    said = "bfloat16: 1 of 6 of equal sizes, and which is not known: up0, up1, up2, up3 and 2 more"
    verdict_of(decision, Verdict.FAIL, L.DGRAD_NOT_IN_FP8, "dgrad of 1 of 12 layers", said)
    assert decision.cause == AS_IT_RUNS


def test_an_expert_that_no_row_was_sent_to_in_the_profiled_step_owes_nothing():
    healthy = layers_evidence()
    without = replace(healthy, products=[p for p in healthy.products if p not in healthy.calls[1].ran.values()])
    verdict_of(check_layers(CASE, without), Verdict.FAIL, L.FPROP_NOT_IN_FP8, "absent: up")
    verdict_of(check_layers(CASE, replace(without, routed=["up"])), Verdict.PASS)


def test_a_converted_layer_that_neither_arm_calls_is_named_in_a_pass():
    ledgers = TwoLedgers(arm_ledger(), arm_ledger(fp8_layers=["q", "up", "up2"]), "torchao")
    decision = check_layers(CASE, layers_evidence(), ledgers=ledgers)
    verdict_of(decision, Verdict.PASS, "1 converted layer was not called in the step that was watched", "up2")
