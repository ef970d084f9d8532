"""The margin in the loss's own unit: a share of it, its type's spacing, or what noise of FP8's size does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from helpers.evidence import arm_ledger, verdict_of
from helpers.losses import STEPS, decided, falling
from pytest_fp8 import Verdict
from pytest_fp8.baselines.store import load_baseline
from pytest_fp8.codes import C
from pytest_fp8.questions.loss.evidence import Curve, is_cross_entropy
from pytest_fp8.stats.loss import LOSS_MARGIN, decide_loss, end_of, least_margin

BASELINES = Path(__file__).parents[1] / "baselines"


@pytest.mark.parametrize(
    ("end", "nats", "eps", "least"),
    [
        (3.0, True, 0.0, 0.02),
        (0.5, True, 0.0, 0.01),
        (2000.0, True, 0.0, 4.0),
        (50.0, False, 0.0, 1.0),
        (46.0, True, 2.0**-7, 0.25),
    ],
    ids=["nats", "below 1", "a sum", "no cross-entropy", "bfloat16"],
)
def test_the_least_margin_is_in_nats_or_a_share_of_the_loss(end, nats, eps, least):
    assert least_margin(end_of([[2 * end, *[end] * 9]]), eps, nats) == pytest.approx(least)


@pytest.mark.parametrize(
    ("changes", "nats"),
    [({}, True), ({"operators": {"": {"mse_loss float32": 1}}}, False), ({"operators": {}, "watched": False}, True)],
)
def test_a_cross_entropy_is_known_by_what_the_step_executes(changes, nats):
    assert is_cross_entropy(arm_ledger(**changes)) is nats


@pytest.mark.parametrize(("factor", "verdict"), [(1.004, Verdict.PASS), (1.3, Verdict.FAIL)])
@pytest.mark.parametrize("unit", [1e-6, 1.0, 3000.0])
def test_of_a_loss_that_is_no_cross_entropy_the_verdict_does_not_depend_on_the_unit(factor, verdict, unit):
    decision = decided(falling(0.5 * unit, factor, 0.001, 2 * unit), falling(0.5 * unit, start=2 * unit), nats=False)
    verdict_of(decision, verdict, "2.0% of the loss")
    assert decision.numbers["margin"] == pytest.approx(0.0104 * unit, rel=0.1)
    assert "nats" not in decision.message


def noisy(reference, by):
    """The reference's curves with noise, which end off by this share to either side."""
    return {
        s: replace(c, losses=[c.losses[0], *(x * (1 + by * (-1) ** s) for x in c.losses[1:])])
        for s, c in reference.items()
    }


@pytest.mark.parametrize(("factor", "verdict"), [(1.1, Verdict.PASS), (2.0, Verdict.FAIL)])
@pytest.mark.parametrize("end", [1e-7, 0.04, 0.4])
def test_a_margin_has_room_for_what_noise_does_to_the_references_end(end, factor, verdict):
    """A batch that is learnt by heart, and a squared error near zero."""
    reference = falling(end)
    fp8 = falling(end, factor, wobble=0.001)
    assert decided(fp8, reference).verdict is Verdict.FAIL
    decision = decided(fp8, reference, noisy=noisy(reference, 0.06))
    verdict_of(decision, verdict, "by which noise of FP8's size moves BF16's own end")
    assert decision.numbers["margin"] == pytest.approx(0.18 * end_of([c.losses for c in reference.values()]), rel=0.01)


def test_noise_that_undoes_a_quarter_of_the_fall_leaves_a_gap_undecided():
    reference = falling(0.5)
    wide = noisy(reference, 0.5)
    verdict_of(decided(falling(0.5, 1.4, wobble=0.01), reference, noisy=wide), Verdict.INCONCLUSIVE, C.TOO_NOISY)
    verdict_of(decided(falling(0.5, 1.01, wobble=0.01), reference, noisy=wide), Verdict.PASS)
    verdict_of(decided(falling(0.5, 4.0, wobble=0.01), reference, noisy=wide), Verdict.FAIL, C.HIGHER)
    diverged = {s: replace(c, losses=[*c.losses[:-1], float("nan")]) for s, c in reference.items()}
    found = decided(falling(0.5, 4.0, wobble=0.01), reference, noisy=diverged)
    verdict_of(found, Verdict.INCONCLUSIVE, C.TOO_NOISY)


@pytest.mark.parametrize(("by", "verdict"), [(0.96, Verdict.PASS), (0.8, Verdict.INCONCLUSIVE)])
def test_a_lower_loss_wants_an_explanation_beyond_noise(by, verdict):
    reference = falling(2.0, start=4.0)
    low, lower = falling(2.0, 0.985, 0.001, start=4.0), falling(2.0, by, 0.001, start=4.0)
    verdict_of(decided(low, reference), Verdict.PASS)
    assert decided(lower, reference).code is C.LOWER
    assert decided(lower, reference, noisy=noisy(reference, 0.02)).verdict is verdict


def test_of_a_loss_about_zero_noise_alone_is_the_margin():
    """An actor's and critic's sum, which learns: shares of it say nothing."""
    reference = {s: Curve(s, [2 - 4 * t / STEPS + 0.01 * s for t in range(STEPS)], [1.0] * STEPS) for s in range(4)}
    fp8 = {s: replace(c, losses=[x + 0.05 + 0.001 * s for x in c.losses]) for s, c in reference.items()}
    fp8 = {s: replace(c, losses=[reference[s].losses[0], *c.losses[1:]]) for s, c in fp8.items()}
    aside = {s: replace(c, losses=[x + 0.04 for x in c.losses]) for s, c in reference.items()}
    verdict_of(decided(fp8, reference, noisy=aside), Verdict.PASS)


def test_no_sound_case_on_record_is_called_too_low_or_too_high():
    """Their noise was not measured: the least margin alone, which is the narrowest."""
    scales = {"own.moe": 0.208}
    found = []
    for path in sorted(BASELINES.rglob("[!_]*.json")):
        for session in load_baseline(path).sessions:
            if gaps := session.metrics.get("loss_gap"):
                gap = decide_loss(gaps, LOSS_MARGIN * scales.get(path.stem.partition("-")[0], 1.0))
                found.append((path.stem, gap.below or gap.verdict is Verdict.FAIL))
    assert len(found) > 100
    assert [name for name, wrong in found if wrong] == []


def test_where_the_reference_diverges_that_is_the_cause():
    curve = [0.8, *(0.8 * 10**t for t in range(1, 8)), *[5e6] * (STEPS - 8)]

    def off(by):
        return {s: Curve(s, [x + (0.01 * s + by) * x for x in curve], [1.0 + by] * STEPS) for s in range(3)}

    verdict_of(decided(off(1e-4), off(0.0), noisy=off(0.02)), Verdict.NOT_EXERCISED, C.NOTHING_LEARNT)


def test_a_small_gap_is_not_shown_as_none():
    from pytest_fp8.report.table import gap_of

    decision = decided(falling(0.001, wobble=0.001), falling(0.0003))
    assert gap_of(decision.numbers) == "+0.0013 (<1.4e-05)"
