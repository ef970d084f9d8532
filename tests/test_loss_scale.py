"""The margin of a loss that is no nats per token: small, summed over a batch, or no finer than its type."""

from dataclasses import replace

import pytest

from helpers.falling import STEPS, decided, falling
from pytest_fp8 import Verdict
from pytest_fp8.questions.loss.check import check_loss
from pytest_fp8.questions.loss.evidence import Curve, LossEvidence
from pytest_fp8.stats.loss import LOSS_MARGIN, LossScale, compare_curves, decide_loss, loss_margin, loss_scale, tail_gap

NATS = LossScale(1.0)


def test_a_squared_error_three_times_as_large_fails():
    decision = decided(falling(0.001, wobble=0.001), falling(0.0003))
    assert decision.verdict is Verdict.FAIL, decision.message
    assert "of the loss, which ends below 1" in decision.message
    assert "nats" not in decision.message
    assert decision.numbers["margin"] < 1e-4


def test_a_squared_error_of_the_same_size_passes_with_its_margin_named():
    decision = decided(falling(0.0003, 1.002, wobble=0.001), falling(0.0003))
    assert decision.verdict is Verdict.PASS, decision.message
    assert "2.0% of the loss, which ends below 1" in decision.message


@pytest.mark.parametrize("end", [1.0, 1.5, 9.0])
def test_a_loss_in_nats_of_one_token_has_its_margin_in_nats(end):
    reference, fp8 = falling(end, start=2 * end), falling(end, 1.0005, wobble=0.0002, start=2 * end)
    twin = [0.01, -0.01, 0.004]
    curves = [[c.losses for c in arm.values()] for arm in (fp8, reference)]
    assert loss_scale(curves[1]).value == 1
    gaps = [tail_gap(a, b) for a, b in zip(*curves, strict=True)]
    assert compare_curves(*curves, twin) == decide_loss(gaps, loss_margin(twin, NATS), floor=LOSS_MARGIN[1])
    assert decided(fp8, reference, frozen_margin=twin).numbers["margin"] == loss_margin(twin, NATS)


@pytest.mark.parametrize(("factor", "verdict"), [(1.004, Verdict.PASS), (1.3, Verdict.FAIL)])
def test_of_a_loss_that_is_no_cross_entropy_the_verdict_does_not_depend_on_the_unit(factor, verdict):
    margins = []
    for unit in (1e-3, 1.0, 18.0, 3000.0):
        fp8, bf16 = falling(0.5 * unit, factor, 0.001, 2 * unit), falling(0.5 * unit, start=2 * unit)
        decision = check_loss(LossEvidence(fp8=fp8, bf16=bf16, twin=bf16, nats=False))
        assert decision.verdict is verdict, decision.message
        assert "nats" not in decision.message
        margins.append(decision.numbers["margin"] / unit)
    assert margins == pytest.approx([margins[0]] * 4)
    assert "2.0% of the loss, which is no cross-entropy" in decision.message


def test_below_one_the_rule_does_not_depend_on_the_unit():
    reference, fp8, twin = falling(0.5), falling(0.5, 1.03, wobble=0.02), falling(0.5, wobble=0.01)
    verdicts, shares = set(), []
    for unit in (1.0, 1e-3, 1e-6):
        arms = [[[x * unit for x in c.losses] for c in arm.values()] for arm in (fp8, reference)]
        gap = compare_curves(*arms, [unit * tail_gap(twin[s].losses, reference[s].losses) for s in twin])
        verdicts.add(gap.verdict)
        shares.append(gap.margin / loss_scale(arms[1]).value)
    assert len(verdicts) == 1
    assert shares == pytest.approx([shares[0]] * 3)
    assert LOSS_MARGIN[0] <= shares[0] <= LOSS_MARGIN[1]


@pytest.mark.parametrize(("end", "verdict"), [(1.08, Verdict.PASS), (1.3, Verdict.FAIL)])
def test_a_margin_has_room_for_what_rounding_does_to_the_last_loss(end, verdict):
    reference = falling(0.04, start=0.05)
    fp8 = {s: Curve(s, [x * end for x in c.losses], [1.1] * STEPS) for s, c in reference.items()}
    twin, rises = falling(0.04, start=0.05, wobble=0.001), {0: [0.002, 0.0025, 0.0015, 0.002]}
    first = {s: [1.1 * c.losses[0]] for s, c in reference.items()}
    assert check_loss(LossEvidence(fp8, reference, twin, moved_first=first)).verdict is Verdict.FAIL
    decision = check_loss(LossEvidence(fp8, reference, twin, moved_first=first, moved_last=rises))
    assert decision.verdict is verdict, decision.message
    assert "0.004 of it for FP8's rounding: BF16's own last loss rises by 0.002" in decision.message


def test_a_last_loss_that_rounding_lowers_widens_no_margin():
    reference, fp8 = falling(0.5, start=2.0), falling(0.5, 1.1, start=2.0)
    lowered = check_loss(LossEvidence(fp8, reference, reference, moved_last={0: [-0.02, -0.03]}))
    assert lowered.verdict is Verdict.FAIL
    assert lowered.numbers["margin"] == check_loss(LossEvidence(fp8, reference, reference)).numbers["margin"]


def test_a_gap_within_the_references_own_noise_is_no_finding():
    reference = falling(0.01)
    up, down, quiet = falling(0.01, 1.1), falling(0.01, 0.9), falling(0.01, 1.001)
    noisy = {s: (down if s % 2 else up)[s] for s in up}
    fp8 = falling(0.01, 1.2, wobble=0.0001)
    undecided = decided(fp8, reference, noisy)
    assert undecided.verdict is Verdict.INCONCLUSIVE, undecided.message
    assert "an arm against itself" in undecided.message
    assert decided(fp8, reference, quiet).verdict is Verdict.FAIL


def test_a_sum_over_a_batch_is_judged_like_its_mean():
    """Gaps of 0.03 % of a loss of 2000, and of 1 %."""
    passed = decided(falling(2000, 1.0003, wobble=1e-4, start=2600), falling(2000, start=2600))
    assert passed.verdict is Verdict.PASS, passed.message
    assert "0.20% of the loss: one of 2000 is no nats of one token" in passed.message
    failed = decided(falling(2000, 1.01, wobble=1e-4, start=2600), falling(2000, start=2600))
    assert failed.verdict is Verdict.FAIL, failed.message
    assert "0.20% of the loss" in failed.message
    assert "nats above" not in failed.message


def in_bfloat16(curves):
    """The curves in steps of a quarter, as bfloat16 has them between 32 and 64."""
    return {s: replace(c, losses=[round(4 * x) / 4 for x in c.losses], eps=2.0**-7) for s, c in curves.items()}


def test_no_margin_is_finer_than_the_losss_own_type():
    """Seen in sound FP8: 46 in bfloat16, where each seed ends half a step higher."""
    reference = in_bfloat16(falling(46, start=60))
    fp8 = {s: replace(c, losses=[*c.losses[:-5], *(x + 0.25 for x in c.losses[-5:])]) for s, c in reference.items()}
    near = {s: replace(c, losses=[*c.losses[:-5], *(x + 0.125 for x in c.losses[-5:])]) for s, c in reference.items()}
    passed = decided({s: replace(c, gradient_norms=[2.0] * STEPS) for s, c in near.items()}, reference)
    assert passed.verdict is Verdict.PASS, passed.message
    assert "the loss's own type is no finer there" in passed.message
    assert decided(fp8, reference).numbers["margin"] == 0.25
    far = {s: replace(c, losses=[*c.losses[:-10], *(x + 0.5 for x in c.losses[-10:])]) for s, c in fp8.items()}
    assert decided(far, reference).verdict is Verdict.FAIL


def test_a_small_gap_is_not_shown_as_none():
    from pytest_fp8.report.table import gap_of

    decision = decided(falling(0.001, wobble=0.001), falling(0.0003))
    assert gap_of(decision.numbers) == "+0.0013 (<1.4e-05)"


def test_the_margin_of_a_stored_gap_is_of_the_losss_own_scale():
    """What an update compares: a gap that grew threefold has moved, however small both are."""
    from pytest_fp8.baselines.review import compare_metric

    def measured(factor):
        numbers = decided(falling(0.0003, factor, wobble=0.001), falling(0.0003)).numbers
        return numbers["gaps"], numbers["margin"]

    stored, _ = measured(1.002)
    assert compare_metric("loss_gap", [stored], *measured(1.1)).word == "worse"
    assert compare_metric("loss_gap", [stored], *measured(1.003)).word == "noise"
