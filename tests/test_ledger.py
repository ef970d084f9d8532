"""Two ledgers compared: each fact that differs is named, with what it means."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers.evidence import WEIGHT, arm_ledger
from helpers.two_ledgers import (
    DIFFERENCES,
    DRAW,
    HEALTHY,
    ledgers,
)
from pytest_fp8.codes import D, L
from pytest_fp8.questions.layers.products import Product
from pytest_fp8.questions.ledger.compare import compare, find_in_ledger
from pytest_fp8.questions.ledger.differences import outermost
from pytest_fp8.questions.ledger.evidence import OwnedProduct, TwoLedgers
from pytest_fp8.questions.ledger.rows import evaluated_otherwise
from pytest_fp8.verdicts import Verdict


@pytest.mark.parametrize(("changes", "code", "seen"), DIFFERENCES)
def test_a_difference_is_named_with_what_it_means(changes, code, seen):
    found = find_in_ledger(ledgers(**changes), "loss" if code in (D.OTHER_DATA, D.OTHER_INPUTS) else "layers")
    assert found is not None
    of_conversion = isinstance(code, L) or code is D.RECOMPUTED_OTHERWISE
    assert (found.code, found.verdict) == (code, Verdict.FAIL if of_conversion else Verdict.INVALID)
    assert seen in found.about + found.seen
    assert found.expected
    assert found.cause
    assert found.next_step


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


@pytest.mark.parametrize(("names", "why"), [(["q.bias"], "have no bias"), (["q.bias", "q.weight"], "does not take it")])
def test_a_bias_that_alone_is_missing_is_told_as_such(names, why):
    before = {**HEALTHY.before, "q.bias": WEIGHT}
    after = {name: weight for name, weight in before.items() if name not in names}
    found = compare(ledgers(reference=arm_ledger(before=before, after=before), before=before, after=after))[0]
    assert found.code is L.WEIGHT_GONE
    assert why in found.cause
    gradients = [*HEALTHY.gradients, "q.bias"]
    missing = ledgers(reference=arm_ledger(gradients=gradients), gradients=[g for g in gradients if g not in names])
    assert ("does not add it" in compare(missing)[0].cause) == (names == ["q.bias"])


def test_numbers_of_several_ranks_are_told_as_such():
    both = TwoLedgers(*(arm_ledger(backward=n, elsewhere=[HEALTHY.calls]) for n in (4, 5)), "torchao")
    found = find_in_ledger(both, "layers")
    assert found is not None
    assert "backward passes in a step, of 2 ranks together" in found.headline
    assert "optimizer steps in a step, of" not in str(found)


def test_swapped_weights_are_called_so():
    before = {name: replace(weight, digest=name) for name, weight in HEALTHY.before.items()}
    one, two = list(before)[:2]
    after = {**before, one: replace(before[one], digest=two), two: replace(before[two], digest=one)}
    found = find_in_ledger(
        ledgers(reference=arm_ledger(before=before, after=before), before=before, after=after), "layers"
    )
    assert found is not None
    assert f"swapped weights: {one} has what was {two}'s" in found.cause


def test_a_tie_that_the_conversion_breaks_is_named():
    tied = {**HEALTHY.before, "lm_head.weight": replace(WEIGHT, same_as="q.weight")}
    [found] = compare(ledgers(reference=arm_ledger(before=tied, after=tied), before=tied))
    assert (found.code, found.about) == (L.UNTIED, "lm_head.weight")


def test_a_hook_that_the_conversion_takes_from_a_parameter_is_named():
    before = {**HEALTHY.before, "q.weight": replace(WEIGHT, hooks=1)}
    assert compare(ledgers(reference=arm_ledger(before=before), before=before, after=before)) == []
    (found,) = compare(ledgers(reference=arm_ledger(before=before), before=before))
    assert (found.code, found.about) == (L.HOOK_GONE, "q.weight")


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
    assert "by up" in found.seen
    assert "draw 2, and another state of the generator" in found.seen


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
