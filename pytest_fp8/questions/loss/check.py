"""Is the loss still right? Whole curves of both arms over several seeds, judged together. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pytest_fp8.codes import C, D
from pytest_fp8.questions.findings import fail, finding
from pytest_fp8.questions.loss.beginning import does_not_restart, first_step
from pytest_fp8.questions.loss.course import trained_otherwise
from pytest_fp8.questions.loss.evidence import Curve, LossEvidence
from pytest_fp8.questions.loss.gap import explain_gap
from pytest_fp8.questions.loss.learning import (
    least_moved,
    moved_share,
    nothing_learnt,
    weights_move_less,
    weights_stand_still,
)
from pytest_fp8.questions.loss.presence import fp8_lost_on_the_way, rare_products
from pytest_fp8.stats.loss import LossGap, compare_curves, spacing, tail_gap
from pytest_fp8.verdicts import Decision, Figures, Finding, Verdict

QUESTION = "loss"
COARSE = 2**-10
"""Spacing at 1 of float16; that of bfloat16 is larger, that of float32 far smaller."""


def judge_gap(evidence: LossEvidence) -> LossGap:
    """The rule alone: is the gap at the end of the horizon above the margin? Curves must be finite."""
    fp8, bf16 = ([arm[s].losses for s in sorted(evidence.fp8)] for arm in (evidence.fp8, evidence.bf16))
    noisy = [evidence.noisy[s].losses for s in sorted(evidence.noisy)]
    return compare_curves(fp8, bf16, evidence.least, noisy)


@dataclass(frozen=True)
class LossFigures(Figures):
    """Losses in nats, or in the unit of the user's own loss; gaps by seed, or by run of one curve, which is one of
    ``seeds``; ``noise_gaps`` of the reference with noise of FP8's size, empty where it was not asked; ``moved`` as
    shares of the weights with a gradient; ``first_bad_step`` counted from 0."""

    gaps: Sequence[float]
    noise_gaps: Sequence[float]
    least_margin: float
    seeds: int
    steps: int
    moved: float | None
    fp8_moved: float | None
    least_moved: float
    margin: float | None = None
    gap: float | None = None
    bound: float | None = None
    first_bad_step: int | None = None


def check_loss(evidence: LossEvidence) -> Decision:
    """Hard rules first (finite, curves that begin anew, same data, not constant, trained alike, close at step 1, not
    bit-equal, FP8 to the end), then the gap. Where that does not fail, the reference must have learnt something."""
    seeds = sorted(evidence.fp8)
    figures = LossFigures(
        gaps=_gaps(evidence.fp8, evidence.bf16),
        noise_gaps=_gaps(evidence.noisy, evidence.bf16),
        least_margin=evidence.least,
        seeds=1 if evidence.one_curve else len(seeds),
        steps=len(evidence.fp8[seeds[0]].losses),
        moved=moved_share(evidence.bf16),
        fp8_moved=moved_share(evidence.fp8),
        least_moved=least_moved(evidence),
    )
    for seed in seeds:
        for name, curve in (("BF16", evidence.bf16[seed]), ("FP8", evidence.fp8[seed])):
            step = first_bad_step(curve)
            if step is not None:
                found = not_finite(name, step, curve, evidence.bf16[seed])
                return found.answer(QUESTION, replace(figures, first_bad_step=step))
    for rule in (
        *(does_not_restart, _other_data, constant, trained_otherwise, weights_stand_still, first_step),
        *(curves_equal, fp8_lost_on_the_way, rare_products),
    ):
        if broken := rule(evidence):
            return broken.answer(QUESTION, figures)
    gap = judge_gap(evidence)
    found = explain_gap(gap, evidence)
    if gap.verdict is not Verdict.FAIL and not gap.below:
        found = weights_move_less(evidence) or nothing_learnt(evidence) or found
    return found.answer(QUESTION, replace(figures, margin=gap.margin, gap=gap.gap, bound=gap.bound))


def _gaps(arm: Mapping[int, Curve], other: Mapping[int, Curve]) -> list[float]:
    """By seed."""
    return [tail_gap(arm[s].losses, other[s].losses) for s in sorted(arm)]


def first_bad_step(curve: Curve) -> int | None:
    """Index of the first step whose loss or gradient norm is not finite."""
    for index, pair in enumerate(zip(curve.losses, curve.gradient_norms, strict=True)):
        if not all(math.isfinite(value) for value in pair):
            return index
    return None


def not_finite(name: str, step: int, curve: Curve, bf16: Curve) -> Finding:
    what = "loss" if not math.isfinite(curve.losses[step]) else "gradient norm"
    value = curve.losses[step] if what == "loss" else curve.gradient_norms[step]
    before = f"; the loss was {curve.losses[step - 1]:.4f} the step before" if step else ""
    headline = f"the {name} arm's {what} is not finite from step {step} on"
    expected = f"finite numbers in all {len(curve.losses)} steps"
    seen = f"{what} = {value} at step {step}, seed {curve.seed}{before}"
    if name == "BF16":
        cause = "the training itself diverges, with FP8 having no part in it"
        then = "lower the learning rate or mend the data; FP8 cannot be judged on this"
        return Finding(C.REFERENCE_NOT_FINITE, Verdict.INVALID, headline, expected, seen, cause, then)
    expected += f" (BF16: {bf16.losses[step]:.4f})"
    cause = "an FP8 value that overflowed to NaN: e4m3 has no infinity"
    then = "save the batch and the weights of that step, and look at the largest activation per layer"
    return Finding(C.NOT_FINITE, Verdict.FAIL, headline, expected, seen, cause, then)


def _other_data(evidence: LossEvidence) -> Finding | None:
    other = [s for s in sorted(evidence.fp8) if evidence.fp8[s].data != evidence.bf16[s].data]
    if not other:
        return None
    seed = other[0]
    seen = f"checksums {evidence.bf16[seed].data:08x} (BF16) and {evidence.fp8[seed].data:08x} (FP8), seed {seed}"
    return finding(D.OTHER_DATA, "the same batch in each step of both arms", seen)


def constant(evidence: LossEvidence) -> Finding | None:
    """The reference's loss is 0 throughout, or one number in every step of both arms. FP8 that is off gives the same,
    so it explains nothing."""
    for seed in sorted(evidence.fp8):
        fp8, bf16 = evidence.fp8[seed].losses, evidence.bf16[seed].losses
        if any(bf16) and not (len(bf16) > 1 and len({*fp8, *bf16}) == 1):
            continue
        value = bf16[0] + 0.0  # -0.0 is 0
        code, verdict = C.CONSTANT, Verdict.INVALID
        cause = "the value of this loss is constant and only its gradient is used; or it is detached or masked"
        then = "Workload(loss=...) or step=... that gives a value to judge by, such as an evaluation loss"
        if evidence.eps >= COARSE and value and any(evidence.bf16[seed].gradient_norms):
            code, verdict = C.CONSTANT_IN_16_BITS, Verdict.NOT_EXERCISED
            cause = (
                "the loss is computed in a type of 16 bits, whose numbers are "
                f"{spacing(value, evidence.eps):.2g} apart there: these steps move it by less; or its value is "
                "constant and only its gradient is used"
            )
            then = (
                "take the loss in float32, as in F.cross_entropy(logits.float(), labels); or more steps, "
                "@pytest.mark.fp8(steps=...)"
            )
        headline, expected = "the loss is the same number in every step", "a loss that moves as the weights do"
        seen = f"{value:.4g} in all {len(bf16)} steps of BF16, seed {seed}"
        return Finding(code, verdict, headline, expected, seen, cause, then)
    return None


def curves_equal(evidence: LossEvidence) -> Finding | None:
    """Losses and gradient norms of every seed. A loss near 60 has one bfloat16 in 0.25, so that the losses of one seed
    can be equal in sound FP8; norms are float32."""
    for s in evidence.fp8:
        mine, reference = evidence.fp8[s], evidence.bf16[s]
        if list(mine.losses) != list(reference.losses) or list(mine.gradient_norms) != list(reference.gradient_norms):
            return None
    return fail(
        C.BIT_EQUAL,
        "FP8 and BF16 gave bit-equal curves",
        expected="losses and gradient norms that differ by rounding",
        seen=f"both equal in every step of {len(evidence.fp8)} seeds",
        cause="FP8 was off: two different precisions cannot agree to the last bit",
        next_step="run the layers question of this case",
    )
