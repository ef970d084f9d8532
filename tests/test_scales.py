"""Scaling state from FP8 to FP8: what is said of it."""

from __future__ import annotations

import pytest

from helpers.evidence import transfer, verdict_of
from pytest_fp8 import Verdict
from pytest_fp8.arms.merging import merged
from pytest_fp8.plain import from_plain
from pytest_fp8.questions.checkpoints.check import check_checkpoints
from pytest_fp8.questions.checkpoints.evidence import Scales

STORED = {"0 scale": 11, "0 amax": 12, "1 scale": 13, "1 amax": 14}
RESET = dict.fromkeys(STORED, 1)


def scales(**changes):
    same = {"stored": STORED, "reset": RESET, "loaded": STORED, "fresh": STORED}
    return Scales(**{**same, "no_place": 0, "refused": "", "failed": "", **changes})


def decided(*each):
    return check_checkpoints([transfer(scales=one) for one in each])


def test_what_comes_back_is_said_once():
    decision = decided(scales(), scales())
    verdict_of(decision, Verdict.PASS, "; 4 tensors of scaling state bit-equal from FP8 to FP8 (dcp)")
    assert decision.message.count("scaling state") == 1
    assert "scaling state" not in decided(None).message


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        ({"loaded": RESET}, "4 differ, 4 of them as in a model without a step: 0 scale"),
        ({"loaded": {**STORED, "1 amax": 1}}, "1 differ, 1 of them as in a model without a step: 1 amax"),
        ({"loaded": {**STORED, "1 scale": 99}}, "1 differ, 0 of them as in a model without a step: 1 scale"),
        ({"loaded": {}}, "4 differ, 0 of them"),
        ({"fresh": {**STORED, "0 scale": 1}}, "a new model loses the scaling state"),
    ],
)
def test_what_is_lost_without_a_word_fails(broken, says):
    verdict_of(decided(scales(), scales(**broken)), Verdict.FAIL, says, "fp8 -> fp8 through dcp", "_extra_state")


@pytest.mark.parametrize(
    ("seen", "says"),
    [
        ({"refused": "Refusing to load pickled state. Set X=1."}, "until that is allowed: Refusing to load"),
        ({"no_place": 2}, "2 layers have no place for scaling state before their first step"),
        ({"failed": "ValueError: sizes", "loaded": {}}, "does not come back from FP8 to FP8 through dcp: ValueError"),
        ({"reset": STORED}, "nothing is known of its way back"),
    ],
)
def test_what_is_loud_by_itself_is_said_and_fails_nobody(seen, says):
    verdict_of(decided(scales(**seen)), Verdict.PASS, says)


def test_ranks_that_differ_have_one_rank_s_state_after_a_load():
    """As the store keeps one copy: no loss where it is a rank's, and one where it is nobody's."""
    told = [
        {"stored": {"0 scale": own}, "reset": {"0 scale": 1}, "loaded": {"0 scale": 11}, "fresh": {"0 scale": 11}}
        | {"refused": "", "failed": "", "no_place": rank}
        for rank, own in enumerate((11, 12))
    ]
    decision = decided(from_plain(Scales, merged("carry_scales", told)))
    verdict_of(
        decision, Verdict.PASS, "ranks keep scaling state that differs", "rank 1: 0 scale", "1 layers have no place"
    )
    told[1]["loaded"] = {"0 scale": 1}
    verdict_of(
        decided(from_plain(Scales, merged("carry_scales", told))), Verdict.FAIL, "1 of them as in a model without"
    )
