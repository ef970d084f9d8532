"""The first steps of a curve, trained again: a reference that keeps something from one curve for the next, beside what
noise of FP8's size does to it."""

import math
from dataclasses import replace

import pytest

from helpers.evidence import curves, verdict_of
from pytest_fp8 import Verdict
from pytest_fp8.codes import C
from pytest_fp8.questions.loss.check import check_loss
from pytest_fp8.questions.loss.evidence import START, Course, LossEvidence

RATE = Course(rates=[[1e-3], [1e-4]])


def started(by=(0.0,) * START, noise=0.0, kept=0.0, **changes):
    """Arms whose reference is trained again from its start, ``by`` off in each step; noise moves that start by
    ``noise`` to either side of where it is then, which is ``kept`` off."""
    fp8, bf16 = curves(0.001), curves(wobble=0.0)
    bf16 = {s: replace(c, data_at_start=5, course=RATE) for s, c in bf16.items()}
    first = bf16[0].losses[:START]
    again = replace(bf16[0], losses=[x + off for x, off in zip(first, by, strict=True)], **changes)
    starts = [[x + kept + side * noise for x in first] for side in (-1, 1, 1, -1)]
    fp8 = {s: replace(c, data_at_start=5, course=RATE) for s, c in fp8.items()}
    return LossEvidence(fp8, bf16, again=again, noisy_starts=starts if noise else ())


@pytest.mark.parametrize(
    ("evidence", "words"),
    [
        (started(data_at_start=7), ["checksum 00000007"]),
        (started(course=Course(rates=[[1e-4]])), ["0.0001, when"]),
        (started([0.0, 0.03, 0.05, 0.04], noise=0.004), ["0.05 apart"]),
        (started([0.0, 0.03, 0.05, 0.04], noise=0.004, kept=0.04), ["0.05 apart"]),
        (started([-0.1, -0.1, -0.1, -0.1], noise=0.01), ["0.1 apart"]),
    ],
    ids=["batches", "rates", "moments", "moments that noise keeps too", "an average"],
)
def test_a_reference_that_keeps_something_is_named_before_a_gap_that_comes_of_it(evidence, words):
    verdict_of(check_loss(evidence), Verdict.INVALID, C.NOT_ANEW, *words)
    higher = {s: replace(c, losses=[x + 0.2 for x in c.losses]) for s, c in evidence.fp8.items()}
    verdict_of(check_loss(replace(evidence, fp8=higher)), Verdict.INVALID, C.NOT_ANEW)


@pytest.mark.parametrize(
    "evidence",
    [
        started(),
        started([0.0, 0.001, -0.002, 0.001], noise=0.004),
        started(course=Course(rates=[[1e-3 * (1 + 2**-9)]])),
        started(course=Course(rates=[[math.nan]])),
    ],
    ids=["the same", "sums in another order", "a rate of the weights", "no rate"],
)
def test_a_reference_that_begins_anew_is_left_alone(evidence):
    verdict_of(check_loss(evidence), Verdict.PASS)
