"""FP8 from the first step of training to the last: counts, calls and products of each seed, by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from helpers.evidence import verdict_of
from helpers.losses import arm, decided
from pytest_fp8 import Verdict
from pytest_fp8.codes import C
from pytest_fp8.questions.loss.evidence import LayerCalls, Look, ProductCount


def with_calls(calls, seed=1):
    fp8 = arm(0.001)
    fp8[seed] = replace(fp8[seed], calls=calls)
    return fp8


def ended(forward, backward, seed=2):
    """The products of the last step, of one seed."""
    fp8 = arm(0.001)
    last = {"forward": ProductCount(*forward), "backward": ProductCount(*backward)}
    fp8[seed] = replace(fp8[seed], last_products={phase: count for phase, count in last.items() if count.fp8 >= 0})
    return fp8


LESS = [
    (ended((0, 15), (0, 30)), "0 in FP8 and 15 others in step 19, seed 2"),
    (ended((14, 1), (0, 30)), "0 in FP8 and 30 others in step 19"),
    (ended((13, 2), (28, 2)), "13 in FP8 and 2 others in step 19"),
    (ended((14, 1), (-1, 0)), "0 in FP8 and 0 others in step 19"),
    (with_calls(LayerCalls([14] * 3 + [0] + [14] * 16, [0] * 3 + [14] + [0] * 16)), "in 1 of 20 steps: 3"),
    (with_calls(LayerCalls([14] * 18 + [13] * 2, [0] * 18 + [1] * 2)), "step 18, seed 1; fewer in FP8 in 2 of 20"),
    (with_calls(LayerCalls([0] * 2 + [14] * 18, [14] * 2 + [0] * 18)), "in step 0, seed 1"),
]
"""In the last step of a seed: all off, the backward pass, one layer, no backward products; one step, one layer, the
first steps."""


@pytest.mark.parametrize(("fp8", "says"), LESS, ids=range(len(LESS)))
def test_fp8_that_is_off_in_some_steps_fails_with_their_numbers(fp8, says):
    verdict_of(decided(fp8), Verdict.FAIL, C.FP8_LOST, says)


@pytest.mark.parametrize(
    "calls",
    [LayerCalls(), LayerCalls([14] * 10 + [9] * 10, [0] * 20), LayerCalls([0] * 20, [14] * 20)],
    ids=["compiled", "an expert rests", "a library without autograd functions"],
)
def test_calls_that_say_nothing_of_fp8_pass(calls):
    verdict_of(decided(with_calls(calls)), Verdict.PASS)


def products(*errors, layer="up", share=0.97, rough=100.0):
    """``share``: of the error of FP8 at its finest, one for all or one for each; ``rough``: of that at its coarsest."""
    shares = share if isinstance(share, list) else [share] * len(errors)
    roughs = [1.0 if error <= 0.01 else rough for error in errors]
    return LayerCalls(
        [1] * 20, [0] * 20, {layer: [Look(*each) for each in zip(range(20), errors, shares, roughs, strict=False)]}
    )


def test_a_product_that_is_more_exact_than_fp8_can_be_fails_with_its_step():
    calls = products(*[0.001] * 8, share=[0.97] * 5 + [0.003] + [1.4] * 2)
    says = "0.3% of that error in step 5, seed 1", "1 of 8"
    verdict_of(decided(with_calls(calls)), Verdict.FAIL, C.TOO_EXACT, *says)


def test_products_that_are_as_exact_as_fp8_can_be_pass():
    verdict_of(decided(with_calls(products(*[0.001] * 8, share=0.05))), Verdict.PASS)


def test_one_product_that_is_wrong_among_right_ones_fails():
    decision = decided(with_calls(products(*[0.001] * 6, 0.4, *[0.001] * 6)))
    verdict_of(decision, Verdict.FAIL, C.RARE_PRODUCT, "40.0% in step 6, seed 1", "1 of 13")
    verdict_of(decided(with_calls(products(*[0.001] * 6, math.nan))), Verdict.FAIL, "nan% in step 6")


@pytest.mark.parametrize(("rough", "verdict"), [(1.8, Verdict.PASS), (4.5, Verdict.FAIL), (math.nan, Verdict.FAIL)])
def test_one_product_that_is_as_wrong_as_fp8_may_be_there_is_no_fault(rough, verdict):
    """Training that diverges has values that take the digits of all others."""
    verdict_of(decided(with_calls(products(*[0.001] * 6, 0.2, *[0.001] * 6, rough=rough))), verdict)


@pytest.mark.parametrize(
    "errors",
    [[0.001] * 12 + [0.0035], [0.3] * 6 + [0.9] * 2, []],
    ids=["the largest of sound arms", "a layer that does more", "none"],
)
def test_products_as_of_sound_arms_pass(errors):
    verdict_of(decided(with_calls(products(*errors))), Verdict.PASS)


@pytest.mark.parametrize(
    "last",
    [
        {"forward": ProductCount(10, 1), "backward": ProductCount(20, 2)},
        {"forward": ProductCount(28, 2), "backward": ProductCount(56, 4)},
        {"forward": ProductCount(16, 3), "backward": ProductCount(32, 6)},
        {},
    ],
    ids=["experts that rest", "a second micro-batch", "other experts", "a step that was not watched"],
)
def test_steps_that_differ_in_work_are_no_finding(last):
    verdict_of(decided(arm(0.001, last=last)), Verdict.PASS)
