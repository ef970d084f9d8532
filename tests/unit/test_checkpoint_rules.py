"""The checkpoint question's check on evidence written by hand. `tests/words/test_words.py` has evidence for
each code."""

from __future__ import annotations

import math

import numpy as np
import pytest

from helpers.evidence import StandIn, trained, transfer, verdict_of
from pytest_fp8 import Verdict
from pytest_fp8.codes import K
from pytest_fp8.questions.checkpoints.carry import relative_distance, with_moved_reference
from pytest_fp8.questions.checkpoints.check import check_checkpoints, logit_limit
from pytest_fp8.questions.checkpoints.evidence import Apart

PASS, FAIL, INVALID = Verdict.PASS, Verdict.FAIL, Verdict.INVALID


def losses(source, resumed, apart=0.0, inputs=((), ())):
    """Steps of source and target; ``apart``: how far the precisions' own losses lie apart at the start."""
    before, after = (trained(each, inputs=given) for each, given in zip((source, resumed), inputs, strict=True))
    return transfer(source=before, resumed=after, start=Apart(0.025, 1024, apart))


def by(source, distance):
    return losses(source, [loss + distance for loss in source])


def own(count, later):
    """A checkpoint through the user's functions whose target has the ``count``, and ``later`` after more steps. What
    each step computes anew is not lost."""
    return transfer(
        saved_changes={"kept": {"attributes": {"count": 4, "norm": 0.5}}},
        loaded_changes={"kept": {"attributes": {"count": count}}},
        store="own",
        source=trained([2.0, 1.9], attributes={"count": 8, "norm": 0.5}),
        resumed=trained([2.0, 1.9], attributes={"count": later, "norm": 0.52}),
    )


STEPS, OTHER = [2.0, 1.9], [3.0, 2.9]
STUDENT = [0.04307, 0.04107, 0.04349, 0.04258], [0.04, 0.03852, 0.04028, 0.03955]
NOT_COMPARED = "states of random generators and buffers that are not persistent are not compared"
DECIDED = [  # transfers, verdict, code, what the message says
    ([losses([0.021, 0.019], [0.0215, 0.0193])], PASS, None, "2 weights bit-equal"),
    ([losses([60.0, 60.25], [60.25, 60.5])], PASS, None, ""),  # a loss in bfloat16
    # In nats, and below a loss of 1 as a share of the largest; to either side.
    ([by(STEPS, -0.052)], FAIL, K.DOES_NOT_GO_ON, ""),
    ([by([0.02, 0.018], 0.00104)], FAIL, K.DOES_NOT_GO_ON, ""),
    # Twice what the precisions do: a cosine loss of a healthy student and its moving average.
    ([losses(*STUDENT)], FAIL, K.DOES_NOT_GO_ON, ""),
    ([losses(*STUDENT, apart=0.0025)], PASS, None, ""),
    ([losses(STUDENT[0], [0.09] * 4, apart=0.05)], FAIL, K.DOES_NOT_GO_ON, ""),
    # A model may be given what it computed itself: other inputs count only where the losses differ.
    ([losses(STEPS, STEPS, inputs=([1, 2], [1, 3]))], PASS, None, ""),
    ([losses(STEPS, OTHER, inputs=([1, 2], [1, 3]))], INVALID, K.DATA_NOT_CARRIED, ""),
    ([own(4, 8)], PASS, None, NOT_COMPARED),
    ([own(0, 4)], FAIL, K.STATE_LOST, "count 4 -> 0"),
]


@pytest.mark.parametrize(("transfers", "verdict", "code", "says"), DECIDED)
def test_what_is_decided(transfers, verdict, code, says):
    decision = check_checkpoints(transfers)
    verdict_of(decision, verdict, says)
    assert decision.code is code


@pytest.mark.parametrize(
    ("apart", "values", "limit"), [(0.001, 1024, 0.05), (0.1, 1024, 0.4), (10, 1024, 1.0), (0.03, 1, 0.25)]
)
def test_the_limit_of_logits_never_reaches_unrelated_weights(apart, values, limit):
    """Those lie the root of 2 apart. One number is a loss."""
    assert logit_limit(Apart(apart, values, 0.0)) == limit


def test_outputs_that_are_not_finite_are_nowhere_near_each_other():
    one, none = np.ones(4, dtype=np.float32), np.full(4, np.nan, dtype=np.float32)
    assert [relative_distance(each, one) for each in (one, 2 * one)] == [0, 1]
    assert relative_distance(one[:2], one) == math.inf
    assert math.isnan(relative_distance(none, none))
    assert math.isnan(relative_distance(one, none))
    assert relative_distance(none, one) == math.inf, "the target alone: something was lost on the way"


# -- what noise does to the reference ---------------------------------------------------------------------------------


class Reference:
    """It tells what its outputs and losses do when its weights are moved."""

    def __init__(self, outputs=(), losses=()):
        self.asked, self._outputs, self._losses = [], list(outputs), losses

    def request(self, operation, noise=None, **arguments):
        self.asked.append(operation if noise is None else "noise")
        if operation == "moved":
            return self._outputs
        by = 0.0 if noise is None else self._losses[noise % len(self._losses)]
        return {"losses": [1.0 + by * (step >= 4) for step in range(arguments["steps"])]}

    def moved(self, transfers):
        arms = StandIn(None, self)
        return arms.run(lambda: with_moved_reference(arms, transfers))


ROUTED = transfer(logit_distance=0.17)
LINE_SEARCH = losses([0.7915, 0.7884, 0.7222, 0.7029], [0.7916, 0.7371, 0.6641, 0.6468])


@pytest.mark.parametrize(
    ("far", "code", "moves", "steady", "asked"),
    [
        # A router that is undecided after training.
        (
            ROUTED,
            K.COMPUTES_OTHERWISE,
            Reference([0.07, 0.17, 0.12]),
            Reference([0.03, 0.04, 0.03]),
            ["curve", "moved"],
        ),
        # Training that small changes send another way, seen on emulated FP8.
        (
            LINE_SEARCH,
            K.DOES_NOT_GO_ON,
            Reference(losses=[0.006, -0.001, 0.039]),
            Reference(losses=[0.006, -0.001, 0.003]),
            ["curve", *["noise"] * 8],
        ),
    ],
)
def test_what_small_changes_of_the_reference_do_is_no_fault_of_the_checkpoint(far, code, moves, steady, asked):
    verdict_of(check_checkpoints([far]), FAIL, code)
    verdict_of(check_checkpoints(moves.moved([far])), PASS)
    verdict_of(check_checkpoints(steady.moved([far])), FAIL, code)
    assert moves.asked == steady.asked == asked


def test_a_reference_is_asked_nothing_more_where_limits_hold_or_nothing_was_loaded():
    reference = Reference()
    sound = [transfer(), transfer(logit_distance=math.nan, loaded_changes={"refused": "no"})]
    assert reference.moved(sound) == sound
    assert not reference.asked
