"""The first steps of the curves: a reference that keeps something from one curve for the next, and first losses of the
arms that lie apart. Both beside what noise of FP8's size does to the reference's own."""

import math
from dataclasses import replace

import pytest

from helpers.evidence import curves, verdict_of
from helpers.losses import STEPS, decided, falling, signed
from pytest_fp8 import Verdict
from pytest_fp8.codes import C
from pytest_fp8.questions.loss.alike import needs_noise
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
    starts = [replace(bf16[0], losses=[x + kept + side * noise for x in first]) for side in (-1, 1, 1, -1)]
    fp8 = {s: replace(c, data_at_start=5, course=RATE) for s, c in fp8.items()}
    return LossEvidence(fp8, bf16, again=again, noisy_starts={0: starts} if noise else {})


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


def test_noise_is_asked_only_where_a_start_or_first_losses_lie_apart():
    assert not needs_noise(started())
    assert needs_noise(started([0.0, 1e-6, 0.0, 0.0]))
    far = started()
    assert needs_noise(replace(far, fp8={s: replace(c, losses=[9.0, *c.losses[1:]]) for s, c in far.fp8.items()}))


def first(factor, noise=0.0, reference=None, **more):
    """First losses ``factor`` times the reference's, which noise moves by that share."""
    reference = reference or falling(2.0, start=4.0, seeds=3)
    fp8 = {
        s: replace(c, losses=[factor * c.losses[0], *c.losses[1:]], gradient_norms=[1.1] * STEPS)
        for s, c in reference.items()
    }
    starts = {s: [replace(c, losses=[c.losses[0] * (1 + x)]) for x in (noise, -noise)] for s, c in reference.items()}
    return decided(fp8, reference, noisy_starts=starts, **more)


@pytest.mark.parametrize(
    ("factor", "noise", "verdict"),
    [
        (1.01, 0.0, None),
        (1.05, 0.0, Verdict.FAIL),
        (1.2, 0.06, None),
        (1.3, 0.06, Verdict.INCONCLUSIVE),
        (2.0, 0.06, Verdict.FAIL),
        (0.5, 0.06, Verdict.FAIL),
    ],
)
def test_first_losses_may_lie_as_far_apart_as_noise_takes_the_references(factor, noise, verdict):
    """A recommender's first loss moves by 6 %."""
    decision = first(factor, noise)
    assert (decision.code is C.FIRST_STEP) == (verdict is not None), decision.message
    assert verdict in (None, decision.verdict)


def test_a_first_loss_near_zero_is_compared_with_the_curves_largest():
    """As a critic's of both signs, and one that starts at 0."""
    assert first(2.0, reference=signed()).code is not C.FIRST_STEP
    assert first(100.0, reference=signed()).code is C.FIRST_STEP
