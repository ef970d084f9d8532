"""Two ledgers compared: each fact that differs is named, with what it means."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers.evidence import WEIGHT, arm_ledger, verdict_of
from helpers.two_ledgers import DIFFERENCES, DRAW, GIVEN, HEALTHY, entered, ledgers, optimizer, weights
from pytest_fp8.codes import C, D, L
from pytest_fp8.questions.layers.products import Product
from pytest_fp8.questions.ledger.compare import blame_in_ledger, compare, find_in_ledger, unless_unlike
from pytest_fp8.questions.ledger.differences import outermost
from pytest_fp8.questions.ledger.evidence import OwnedProduct, TwoLedgers
from pytest_fp8.questions.ledger.rows import evaluated_otherwise
from pytest_fp8.verdicts import Decision, Verdict


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


def test_numbers_of_several_ranks_are_told_as_such():
    both = TwoLedgers(*(arm_ledger(backward=n, elsewhere=[HEALTHY.calls]) for n in (4, 5)), "torchao")
    found = find_in_ledger(both, "layers")
    assert found is not None
    assert "backward passes in a step, of 2 ranks together" in found.headline
    assert "optimizer steps in a step, of" not in str(found)


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


def test_what_differs_behind_what_is_alike_is_found():
    (found,) = compare(ledgers(operators={**HEALTHY.operators, "": {"abs bfloat16": 1}}))
    assert "operators of the model itself" in found.headline


def test_the_first_draw_from_another_state_is_named():
    first, second = DRAW, replace(DRAW, owner="up", state="s2")
    (found,) = compare(
        ledgers(reference=arm_ledger(draws=[first, second]), draws=[first, replace(second, state="s3")], random="other")
    )
    assert "by up in the forward pass, draw 2, from the generator's state s3" in found.seen


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
    assert find_in_ledger(other, "speedup") is None
    assert find_in_ledger(other, "layers") is None


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


@pytest.mark.parametrize("members", [{}, {"q.weight": 0, "up.weight": 0}])
@pytest.mark.parametrize("seen", [Verdict.PASS, Verdict.FAIL, Verdict.INVALID])
def test_weights_that_no_optimizer_steps_fail_the_loss_whatever_its_curves_say(members, seen):
    lost = ledgers(optimizer=optimizer(members=members))
    judged = Decision(None if seen is Verdict.PASS else CODE, seen, "the curves", question="loss")
    decision = unless_unlike(judged, lost)
    verdict_of(decision, Verdict.FAIL, L.NOT_IN_OPTIMIZER, "lm_head.weight")
    timed = Decision(None, Verdict.PASS, "1.96x", question="speedup")
    assert unless_unlike(timed, lost) is timed


def test_fp8_that_was_left_is_said_before_what_differs_by_it():
    left = Decision(C.FP8_LOST, Verdict.FAIL, "FP8 ran in step 0 and not in step 3", question="loss")
    assert unless_unlike(left, ledgers(operators={**HEALTHY.operators, "": {"abs bfloat16": 1}})) is left
