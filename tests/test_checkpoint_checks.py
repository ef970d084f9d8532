"""The checkpoint question's check on evidence written by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from helpers.evidence import trained, transfer, verdict_of
from helpers.stand_in import StandIn
from pytest_fp8 import Verdict
from pytest_fp8.codes import K
from pytest_fp8.questions.checkpoints.carry import relative_distance, with_moved_reference
from pytest_fp8.questions.checkpoints.check import check_checkpoints, logit_limit
from pytest_fp8.questions.checkpoints.evidence import Apart


def losses(source, resumed):
    return transfer(source=trained(source), resumed=trained(resumed))


@pytest.mark.parametrize(
    ("source", "resumed"),
    [
        ([2.0, 1.9], [2.04, 1.94]),
        ([0.021, 0.019], [0.0215, 0.0193]),
        ([-0.4, 0.2], [-0.39, 0.2]),
        ([1900.0, 1850.0], [1903.0, 1854.0]),
        ([60.0, 60.25], [60.25, 60.5]),
    ],
    ids=["nats", "a small squared error", "both signs", "a sum over the batch", "a loss in bfloat16"],
)
def test_healthy(source, resumed):
    verdict_of(check_checkpoints([losses(source, resumed)]), Verdict.PASS, "2 weights bit-equal")


@pytest.mark.parametrize(
    ("source", "within", "beyond"),
    [([2.0, 1.9], 0.048, 0.052), ([0.02, 0.018], 0.00096, 0.00104)],
    ids=["in nats", "below a loss of 1 a share of the largest"],
)
def test_how_far_resumed_losses_may_lie_from_the_source_s(source, within, beyond):
    for sign in (1, -1):
        assert check_checkpoints([losses(source, [x + sign * within for x in source])]).verdict is Verdict.PASS
        lost = check_checkpoints([losses(source, [x + sign * beyond for x in source])])
        verdict_of(lost, Verdict.FAIL, K.DOES_NOT_GO_ON)


def test_the_limit_of_logits_never_reaches_unrelated_weights():
    assert logit_limit(Apart(0.001, 1024, 0.0)) == 0.05
    assert logit_limit(Apart(0.1, 1024, 0.0)) == 0.4
    assert logit_limit(Apart(10, 1024, 0.0)) == 1.0 < 2**0.5
    assert logit_limit(Apart(0.03, 1, 0.0)) == 0.25, "one number is a loss"


def test_a_loss_may_differ_by_twice_what_the_precisions_do():
    """A cosine loss of a healthy student and its moving average."""
    apart, target = [0.04307, 0.04107, 0.04349, 0.04258], [0.04, 0.03852, 0.04028, 0.03955]
    verdict_of(check_checkpoints([losses(apart, target)]), Verdict.FAIL, K.DOES_NOT_GO_ON)
    known = replace(losses(apart, target), start=Apart(0.03, 1, 0.0025))
    assert check_checkpoints([known]).verdict is Verdict.PASS
    lost = replace(losses(apart, [0.09, 0.09, 0.09, 0.09]), start=Apart(0.03, 1, 0.05))
    assert check_checkpoints([lost]).verdict is Verdict.FAIL


class Reference:
    """It tells what its outputs and losses do when its weights are moved."""

    def __init__(self, outputs, losses):
        self.asked, self._outputs, self._losses = [], outputs, losses

    def request(self, operation, noise=None, **arguments):
        self.asked.append(operation if noise is None else "noise")
        if operation == "moved":
            return self._outputs
        by = 0.0 if noise is None else self._losses[noise % len(self._losses)]
        return {"losses": [1.0 + by * (step >= 4) for step in range(arguments["steps"])]}

    def moved(self, transfers):
        arms = StandIn(None, self)
        return arms.run(lambda: with_moved_reference(arms, transfers))


def test_a_router_that_is_undecided_after_training_is_no_fault_of_the_checkpoint():
    far = transfer(logit_distance=0.17)
    verdict_of(check_checkpoints([far]), Verdict.FAIL, K.COMPUTES_OTHERWISE)
    undecided, steady = Reference([0.07, 0.17, 0.12], []), Reference([0.03, 0.04, 0.03], [])
    verdict_of(check_checkpoints(undecided.moved([far])), Verdict.PASS)
    verdict_of(check_checkpoints(steady.moved([far])), Verdict.FAIL, K.COMPUTES_OTHERWISE)
    assert undecided.asked == steady.asked == ["curve", "moved"]


def test_training_that_small_changes_send_another_way_is_no_fault_of_the_checkpoint():
    """A line search, seen on emulated FP8."""
    astray = losses([0.7915, 0.7884, 0.7222, 0.7029], [0.7916, 0.7371, 0.6641, 0.6468])
    verdict_of(check_checkpoints([astray]), Verdict.FAIL, K.DOES_NOT_GO_ON)
    searching, steady = Reference([], [0.006, -0.001, 0.039]), Reference([], [0.006, -0.001, 0.003])
    verdict_of(check_checkpoints(searching.moved([astray])), Verdict.PASS)
    verdict_of(check_checkpoints(steady.moved([astray])), Verdict.FAIL, K.DOES_NOT_GO_ON)
    assert searching.asked == ["curve", *["noise"] * 8]


def test_a_source_that_diverged_says_nothing_of_its_checkpoint():
    broken = transfer(logit_distance=math.nan)
    verdict_of(check_checkpoints([transfer(), broken]), Verdict.INVALID, K.OUTPUTS_NOT_FINITE)
    one, none = np.ones(4, dtype=np.float32), np.full(4, np.nan, dtype=np.float32)
    assert math.isnan(relative_distance(none, none))
    assert math.isnan(relative_distance(one, none))
    assert relative_distance(none, one) == math.inf, "the target alone: something was lost on the way"


def test_a_reference_is_asked_nothing_more_where_limits_hold_or_nothing_was_loaded():
    reference = Reference([], [])
    sound = [transfer(), transfer(logit_distance=math.nan, loaded_changes={"refused": "no"})]
    assert reference.moved(sound) == sound
    assert not reference.asked


def test_other_inputs_count_only_where_the_losses_differ():
    """A model may be given what it computed itself, which differs with the precision."""
    source = trained([2.0, 1.9], inputs=[1, 2])
    close = transfer(source=source, resumed=trained([2.0, 1.9], inputs=[1, 3]))
    assert check_checkpoints([close]).verdict is Verdict.PASS
    apart = transfer(source=source, resumed=trained([3.0, 2.9], inputs=[1, 3]))
    verdict_of(check_checkpoints([apart]), Verdict.INVALID, K.DATA_NOT_CARRIED)
    # An optimizer with a closure computes one batch's loss as often as its numbers ask for.
    again = transfer(source=source, resumed=trained([3.0, 2.9], inputs=[1, 1, 2]))
    verdict_of(check_checkpoints([again]), Verdict.FAIL, K.DOES_NOT_GO_ON)


def own(count, later):
    """A checkpoint through the user's functions whose target has the ``count``, and ``later`` after more steps."""
    return transfer(
        saved_changes={"kept": {"attributes": {"count": 4, "norm": 0.5}}},
        loaded_changes={"kept": {"attributes": {"count": count}}},
        store="own",
        source=trained([2.0, 1.9], attributes={"count": 8, "norm": 0.5}),
        resumed=trained([2.0, 1.9], attributes={"count": later, "norm": 0.52}),
    )


def test_what_each_step_computes_anew_is_not_lost():
    sound = check_checkpoints([own(4, 8)])
    verdict_of(sound, Verdict.PASS, "states of random generators and buffers that are not persistent are not compared")
    verdict_of(check_checkpoints([own(0, 4)]), Verdict.FAIL, K.ATTRIBUTES_LOST, "count 4 -> 0")
