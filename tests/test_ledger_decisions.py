"""What two ledgers that differ make of a question's decision: invalid, or a cause that is said first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers.evidence import verdict_of
from helpers.two_ledgers import GIVEN, HEALTHY, entered, ledgers, optimizer, weights
from pytest_fp8.codes import C, D, L
from pytest_fp8.questions.ledger.compare import blame_in_ledger, find_in_ledger, unless_unlike
from pytest_fp8.recipes import recipe_facts
from pytest_fp8.verdicts import Decision, Verdict

CODE = C.MOVE_LESS
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


@pytest.mark.parametrize("members", [{}, {"q.weight": 0, "up.weight": 0}])
@pytest.mark.parametrize("seen", [Verdict.PASS, Verdict.FAIL, Verdict.INVALID])
def test_weights_that_no_optimizer_steps_fail_the_loss_whatever_its_curves_say(members, seen):
    lost = ledgers(optimizer=optimizer(members=members))
    judged = Decision(None if seen is Verdict.PASS else CODE, seen, "the curves", question="loss")
    decision = unless_unlike(judged, lost)
    verdict_of(decision, Verdict.FAIL, L.NOT_IN_OPTIMIZER, "lm_head.weight")
    timed = Decision(None, Verdict.PASS, "1.96x", question="speedup")
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
    decision = unless_unlike(Decision(None, Verdict.PASS, "the curves", question="loss"), lost)
    verdict_of(decision, Verdict.FAIL, L.NOT_IN_OPTIMIZER, "q.weight", cause)


def test_weights_that_the_trainer_wraps_are_told_with_the_option_of_the_mark():
    lost = ledgers("trainer_torchao", optimizer=optimizer(members={"up.weight": 0, "lm_head.weight": 0}))
    decision = unless_unlike(Decision(None, Verdict.PASS, "the curves", question="loss"), lost)
    option = 'options={"fp8_all_gather": False} in this test\'s mark'
    verdict_of(decision, Verdict.FAIL, L.NOT_IN_OPTIMIZER, "enable_fsdp_float8_all_gather", option)
    assert "fp8_all_gather" in recipe_facts("trainer_torchao", "tensorwise").options


def test_fp8_that_was_left_is_said_before_what_differs_by_it():
    left = Decision(C.FP8_LOST, Verdict.FAIL, "FP8 ran in step 0 and not in step 3", question="loss")
    assert unless_unlike(left, ledgers(operators={**HEALTHY.operators, "": {"abs bfloat16": 1}})) is left
