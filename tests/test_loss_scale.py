"""Losses that are no nats per token: small, zero, of both signs, or summed over a batch."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from pytest_fp8 import Case, Verdict
from pytest_fp8.plain import to_plain
from pytest_fp8.questions.again import look_again
from pytest_fp8.questions.loss.check import check_loss, judge_gap
from pytest_fp8.questions.loss.evidence import Curve, LossEvidence, loss_looks
from pytest_fp8.questions.loss.gap import explain_gap
from pytest_fp8.rules.loss import (
    LOSS_ALPHA,
    LOSS_MARGIN,
    MAX_LOSS_SEEDS,
    LossGap,
    LossScale,
    compare_curves,
    decide_loss,
    loss_margin,
    loss_scale,
    tail_gap,
)

STEPS = 50
NATS = LossScale(1.0)


def falling(end, factor=1.0, wobble=0.0, start=1.0, seeds=4):
    """Curves from ``start`` to ``end``; ``factor`` and ``wobble`` (a share of the end, another for each seed) act on
    what comes after the first step."""
    path = np.geomspace(start, end, STEPS)
    return {
        s: Curve(s, [start, *(path[1:] * (factor + wobble * (s - 1.4)))], [1.0 + s + factor] * STEPS)
        for s in range(seeds)
    }


def decided(fp8, bf16, twin=None, **frozen):
    return check_loss(LossEvidence(fp8=fp8, bf16=bf16, twin=twin or bf16), **frozen)


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


def signed(offset=0.0, noise=0.3, seeds=4):
    """Curves about zero, as a policy gradient's or a critic's are."""
    return {
        s: Curve(
            s, [0.004 if not t else noise * np.cos(2.2 * t + s) + offset for t in range(STEPS)], [1.0 + offset] * STEPS
        )
        for s in range(seeds)
    }


def test_a_loss_of_both_signs_never_fails_and_says_why_it_is_undecided():
    decision = decided(signed(0.05), signed())
    assert decision.verdict is Verdict.INCONCLUSIVE, decision.message
    assert "changes sign" in decision.message
    assert "one sign" in decision.message


@pytest.mark.parametrize(
    ("factor", "verdict"), [(1.05, None), (1.3, Verdict.INCONCLUSIVE), (2.0, Verdict.FAIL), (0.5, Verdict.FAIL)]
)
def test_first_losses_may_lie_as_far_apart_as_moved_weights_take_the_references(factor, verdict):
    """A recommender's first loss moves by 6 % with weights that are moved as FP8 moves products."""
    reference = falling(2.0, start=4.0, seeds=3)
    fp8 = {s: Curve(s, [factor * c.losses[0], *c.losses[1:]], [1.1] * STEPS) for s, c in reference.items()}
    moved = {s: [c.losses[0] * x for x in (0.93, 1.05, 1.07, 0.95)] for s, c in reference.items()}
    alone = check_loss(LossEvidence(fp8, reference, reference))
    assert "very first step" in alone.message
    decision = check_loss(LossEvidence(fp8, reference, reference, moved_first=moved))
    assert ("very first step" in decision.message) == (verdict is not None), decision.message
    assert verdict in (None, decision.verdict)
    if verdict is not None:
        assert "next:" in decision.message


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


@pytest.mark.parametrize(("first", "fails"), [(0.03, False), (0.4, True)])
def test_the_first_loss_of_both_signs_may_be_further_apart(first, fails):
    """0.026 apart is 9 % of the curve's largest loss, as seen of a critic's in sound FP8."""
    reference = signed()
    apart = {s: Curve(s, [first, *signed(0.001)[s].losses[1:]], c.gradient_norms) for s, c in reference.items()}
    decision = decided(apart, reference)
    assert ("very first step" in decision.message) == fails, decision.message
    assert (decision.verdict is Verdict.FAIL) == fails


def test_a_gap_within_the_references_own_noise_is_no_finding():
    reference = falling(0.01)
    noisy, quiet = falling(0.01, 1.1), falling(0.01, 1.001)
    fp8 = falling(0.01, 1.2, wobble=0.0001)
    undecided = decided(fp8, reference, noisy)
    assert undecided.verdict is Verdict.INCONCLUSIVE, undecided.message
    assert "an arm against itself" in undecided.message
    assert decided(fp8, reference, quiet).verdict is Verdict.FAIL


@pytest.mark.parametrize(
    ("curve", "rises"),
    [
        ([0.8, *(0.8 * 10**t for t in range(1, 8)), *[5e6] * (STEPS - 8)], True),
        ([0.5, 1.7, *[0.3 / (t + 1) for t in range(STEPS - 2)]], False),
        ([0.5, 1.7, *[1e-7] * (STEPS - 2)], False),
        ([0.5] * STEPS, False),
    ],
    ids=["diverges", "a bump at its start", "learnt by heart", "flat"],
)
def test_where_the_reference_diverges_that_is_the_cause(curve, rises):
    undecided = LossGap(gap=0.1, bound=1.0, margin=0.5, verdict=Verdict.INCONCLUSIVE)
    _, said = explain_gap(undecided, loss_scale([curve], nats=False), [curve], noise=0.0)
    assert ("its training diverges" in said["cause"]) is rises
    assert ("learning_rate" in said["next_step"]) is rises


def test_a_loss_learnt_by_heart_is_undecided():
    decision = decided(falling(3e-7, 2.0, wobble=0.001), falling(1e-7))
    assert decision.verdict is Verdict.INCONCLUSIVE, decision.message
    assert "the rest is rounding" in decision.message


def test_a_loss_that_both_arms_bring_to_zero_passes():
    reference = {s: Curve(s, [*(1.0 - 0.1 * t for t in range(10)), *[0.0] * 40], [1.0] * STEPS) for s in range(3)}
    fp8 = {s: Curve(s, [1.001, *c.losses[1:]], [1.1] * STEPS) for s, c in reference.items()}
    assert decided(fp8, reference).verdict is Verdict.PASS


@pytest.mark.parametrize("value", [0.0, 3.25])
def test_a_loss_that_never_moves_is_no_finding_against_fp8(value):
    still = {s: Curve(s, [value] * STEPS, [1.0 + s] * STEPS) for s in range(3)}
    decision = decided(still, still)
    assert decision.verdict is Verdict.INVALID, decision.message
    assert "the same number in every step" in decision.message
    assert "next:" in decision.message


def test_a_loss_of_16_bits_that_moves_by_less_than_they_show_is_not_exercised():
    still = {s: Curve(s, [2.28125] * STEPS, [1.0 + s] * STEPS, eps=2**-7) for s in range(3)}
    decision = decided(still, still)
    assert decision.verdict is Verdict.NOT_EXERCISED, decision.message
    assert "0.016 apart" in decision.message
    assert "logits.float()" in decision.message
    without = {s: Curve(s, [2.28125] * STEPS, [0.0] * STEPS, eps=2**-7) for s in range(3)}
    assert decided(without, without).verdict is Verdict.INVALID, "no gradient: the value is not what is wrong"


def test_a_first_loss_of_zero_is_compared_with_the_curves_largest():
    path = np.linspace(2, 1, STEPS - 1)
    near = {s: Curve(s, [0.01, *(path + 0.001)], [1.0] * STEPS) for s in range(3)}
    reference = {s: Curve(s, [0.0, *path], [1.0] * STEPS) for s in range(3)}
    assert decided(near, reference).verdict is Verdict.PASS
    far = {s: Curve(s, [0.5, *c.losses[1:]], c.gradient_norms) for s, c in near.items()}
    decision = decided(far, reference)
    assert decision.verdict is Verdict.FAIL
    assert "0.0000 within 2% of 2.0000, the curve's largest loss" in decision.message


def test_the_first_step_s_cause_names_state_outside_the_model_and_dropped_behaviour():
    far = {s: Curve(s, [x + 1 for x in c.losses], c.gradient_norms) for s, c in falling(2.0, start=4.0).items()}
    message = decided(far, falling(2.0, start=4.0)).message
    for words in ("very first step", "a counter in a Python attribute", "a subclass's own forward, a hook", "a buffer"):
        assert words in message


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


@pytest.mark.parametrize(("seeds", "advice"), [(4, 8), (8, 16)])
def test_more_seeds_are_more_than_there_were(seeds, advice):
    decision = decided(falling(2.0, 1.01, wobble=0.01, start=3.0, seeds=seeds), falling(2.0, start=3.0, seeds=seeds))
    assert decision.verdict is Verdict.INCONCLUSIVE, decision.message
    assert f"loss_seeds={advice})" in decision.message


def test_a_small_gap_is_not_shown_as_none():
    from pytest_fp8.report.ledger import Entry
    from pytest_fp8.report.terminal import row

    decision = decided(falling(0.001, wobble=0.001), falling(0.0003))
    entry = Entry("own")
    entry.decisions["loss"] = {"verdict": "FAIL", "numbers": decision.numbers}
    assert "+0.0013 (<1.4e-05) FAIL" in row(entry)[3]


def test_the_margin_of_a_stored_gap_is_of_the_losss_own_scale():
    """What an update compares: a gap that grew threefold has moved, however small both are."""
    from pytest_fp8.baselines.review import compare_metric

    def measured(factor):
        numbers = decided(falling(0.0003, factor, wobble=0.001), falling(0.0003)).numbers
        return numbers["gaps"], numbers["margin"]

    stored, _ = measured(1.002)
    assert compare_metric("loss_gap", [stored], *measured(1.1)).word == "worse"
    assert compare_metric("loss_gap", [stored], *measured(1.003)).word == "noise"


class Arms:
    """Stands in for a pair of arms: answers ``curve`` with what it was given, and counts."""

    def __init__(self, case, fp8, bf16):
        self.case, self.asked = case, []
        self.fp8, self.bf16 = Arm(fp8, self.asked), Arm(bf16, self.asked)

    def shared(self, what, ask):
        return ask()

    once = shared

    def beside(self, operation, reference, **arguments):
        return self.fp8.request(operation, **arguments), reference()


class Arm:
    def __init__(self, curves, asked):
        self.curves, self.asked = curves, asked

    def request(self, operation, seed, steps, jitter=False, watch=False):
        self.asked.append((operation, seed))
        return to_plain(self.curves[seed])


def seeds_asked(fp8, bf16):
    """How many seeds are asked while the rule does not decide."""
    arms = Arms(Case("own", "torchao", "tensorwise", emulated=True, loss_seeds=2), fp8, bf16)
    evidence, _ = look_again(loss_looks(arms, twin=True), judge_gap)
    asked = Counter(seed for _, seed in arms.asked)
    assert asked == {seed: 4 if seed in evidence.fp8_twin else 3 for seed in evidence.fp8}
    return len(evidence.fp8)


def test_a_loss_near_zero_is_given_the_seeds_that_its_own_margin_needs():
    """Two seeds of a squared error three times as large lie within 0.02 and decide nothing of a loss of 0.0003."""
    fp8, bf16 = falling(0.001, wobble=0.1, seeds=8), falling(0.0003, wobble=0.01, seeds=8)
    assert 2 < seeds_asked(fp8, bf16) <= MAX_LOSS_SEEDS


def test_seeds_that_never_decide_end_at_the_largest_number():
    assert seeds_asked(signed(0.05, seeds=9), signed(seeds=9)) == MAX_LOSS_SEEDS


def test_no_further_seed_is_asked_after_one_that_none_can_mend():
    bf16 = falling(2.0, start=3.0, seeds=8)
    broken = {s: Curve(s, [*c.losses[:-1], math.nan], c.gradient_norms) for s, c in bf16.items()}
    other = {s: Curve(s, c.losses, c.gradient_norms, data=1) for s, c in bf16.items()}
    assert seeds_asked(broken, bf16) == seeds_asked(other, bf16) == 1


def judged(rng, factor, noise, end, seeds=3):
    """The verdict on losses that fall to ``end`` and wander around that by ``noise`` (a share, another for each curve,
    slowly), FP8's ``factor`` times as high; seeds are added one by one while they do not decide."""

    def curve(factor=1.0):
        wandering = np.cumsum(rng.normal(0, noise / np.sqrt(STEPS), STEPS))
        return np.geomspace(1, end, STEPS) * factor * np.exp(wandering)

    fp8, bf16, twin_gaps = [], [], []
    while True:
        reference = curve()
        fp8.append(curve(factor))
        bf16.append(reference)
        twin_gaps.append(tail_gap(curve(), reference))
        if len(bf16) >= seeds:
            verdict = compare_curves(fp8, bf16, twin_gaps).verdict
            if verdict is not Verdict.INCONCLUSIVE or len(bf16) >= MAX_LOSS_SEEDS:
                return verdict


def judged_rate(verdict, factor=1.0, noise=0.01, end=0.003, repeats=600):
    rng = np.random.default_rng(5)
    return np.mean([judged(rng, factor, noise, end) is verdict for _ in range(repeats)])


@pytest.mark.parametrize("end", [0.5, 3e-3, 3e-6])
@pytest.mark.parametrize("noise", [0.003, 0.03, 0.3])
def test_a_healthy_small_loss_rarely_fails_however_it_wanders(noise, end):
    assert judged_rate(Verdict.FAIL, noise=noise, end=end) <= LOSS_ALPHA


def test_a_small_loss_that_is_half_as_high_again_fails_and_a_like_one_passes():
    assert judged_rate(Verdict.FAIL, factor=1.5) > 0.99
    assert judged_rate(Verdict.FAIL, factor=1.1) > 0.9
    assert judged_rate(Verdict.PASS, factor=1.0) > 0.95


def test_a_gap_as_large_as_the_references_own_drift_is_hardly_ever_called_one(monkeypatch):
    """The margin is 5 % of the loss at most, and BF16 ends 10 % from itself."""
    assert judged_rate(Verdict.FAIL, factor=1.1, noise=0.1) <= LOSS_ALPHA
    monkeypatch.setattr("pytest_fp8.rules.loss.loss_noise", lambda gaps: 0.0)
    assert judged_rate(Verdict.FAIL, factor=1.1, noise=0.1) > LOSS_ALPHA, "the simulation sees what that rule prevents"
