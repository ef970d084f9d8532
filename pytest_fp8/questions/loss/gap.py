"""The words for a loss gap: what was seen against which margin, the likely cause, what to do. Pure."""

from __future__ import annotations

from statistics import fmean

from pytest_fp8.codes import C
from pytest_fp8.questions.findings import fail
from pytest_fp8.questions.loss.evidence import LossEvidence
from pytest_fp8.stats.loss import OF_FALL, OF_NOISE, LossGap, spacing
from pytest_fp8.verdicts import Finding, Verdict, passed

ONE_CURVE = (
    "all seeds give this one curve, for neither weights nor batches depend on the seed: the spread is that of "
    "rounding, not of training"
)
OTHER_BATCHES = "draw in batch(step) with torch's generators, which are seeded for each seed and step"


def explain_gap(gap: LossGap, evidence: LossEvidence) -> Finding:
    """The rule's verdict with its lines."""
    seen, which, amount = _seen(gap, evidence), _which_margin(gap, evidence), evidence.amount
    if gap.verdict is Verdict.PASS:
        said = f"{seen}, margin {amount(gap.margin).removesuffix(' nats')}{which}"
        return passed(f"{said}; {ONE_CURVE}" if evidence.one_curve else said)
    if gap.verdict is Verdict.FAIL:
        return fail(
            C.HIGHER,
            "FP8 training ends at a higher loss than BF16",
            expected=f"less than {amount(gap.margin)} above BF16{which}",
            seen=seen,
            cause="scales that saturate or underflow, or a recipe too coarse for this model; or a fault that begins "
            "after the first steps, such as weights or inputs that an FP8 layer keeps from an earlier step",
            next_step="ask assert_numerics(), which looks at the products after some training, too; if they are "
            "right, leave sensitive layers in BF16, or try a recipe with finer scales",
        )
    if gap.below:
        return Finding(
            C.LOWER,
            Verdict.INCONCLUSIVE,
            "FP8 training ends at a lower loss than BF16, by more than noise",
            expected=f"at most {amount(gap.floor)} below BF16: FP8 adds rounding, which does not teach",
            seen=seen,
            cause="the two arms' losses are not the same quantity: a mean over fewer tokens in the FP8 arm (NaN that "
            "is masked, labels that are ignored), dropout or another regularisation that is off in it, or another "
            "learning rate",
            next_step="in a late step of each arm, count the tokens that enter the mean, and compare model.training, "
            "dropout and the optimizer's settings",
        )
    code, cause, next_step = _why_undecided(gap, evidence)
    expected = f"a gap clearly below or above {amount(gap.margin)}{which}"
    return Finding(code, Verdict.INCONCLUSIVE, "the seeds do not decide", expected, seen, cause, next_step)


def _which_margin(gap: LossGap, evidence: LossEvidence) -> str:
    """For a margin that is not the least one in nats: what it is of."""
    if gap.margin > evidence.least:
        by = evidence.amount(gap.noise / OF_NOISE)
        most = f"; at most {OF_FALL:.0%} of what the loss falls by" if gap.margin < gap.noise else ""
        return f" ({OF_NOISE:.0f} times {by}, by which noise of FP8's size moves BF16's own end{most})"
    if evidence.eps and spacing(evidence.end, evidence.eps) >= evidence.least:
        return " (the loss's own type is no finer there)"
    return "" if evidence.in_nats or not evidence.end else f" ({evidence.least / evidence.end:.1%} of the loss)"


def _seen(gap: LossGap, evidence: LossEvidence) -> str:
    runs, steps = len(evidence.bf16), len(next(iter(evidence.bf16.values())).losses)
    what = f"one curve, run {runs} times one rounding apart" if evidence.one_curve else f"{runs} seeds"
    over = f"over {steps} steps of {what} (BF16 ends at "
    if evidence.in_nats:
        return f"{gap.gap:+.4f} nats +- {gap.bound:.4f} {over}{_end(evidence):.3f})"
    return f"{gap.gap:+.3g} +- {gap.bound:.3g} {over}{_end(evidence):.4g})"


def _end(evidence: LossEvidence) -> float:
    return fmean(curve.losses[-1] for curve in evidence.bf16.values())


def _why_undecided(gap: LossGap, evidence: LossEvidence) -> tuple[C, str, str]:
    """Code, cause and next step of curves that do not decide."""
    one, runs = evidence.one_curve, len(evidence.bf16)
    more = f"more {'runs' if one else 'seeds'}: @pytest.mark.fp8(seeds={max(8, 2 * runs)})"
    if gap.noise > gap.margin:
        return (
            C.TOO_NOISY,
            f"noise of FP8's size already moves the end of BF16's own curves by {evidence.amount(gap.noise)} (3 sd), "
            f"more than {OF_FALL:.0%} of what its loss falls by",
            f"a smaller learning rate, a larger batch or more steps; or {more}",
        )
    if one:
        return C.MORE_SEEDS, f"its runs do not decide; {ONE_CURVE}", f"{OTHER_BATCHES}; or {more}"
    if gap.bound < gap.margin / 2:
        return C.MORE_SEEDS, "the gap lies so near the margin that its small spread includes it", more
    return C.MORE_SEEDS, "the spread between seeds is as large as the margin", more
