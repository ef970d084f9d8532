"""The words for a loss gap: what was seen against which margin, the likely cause, what to do. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from pytest_fp8.codes import C
from pytest_fp8.questions.findings import fail
from pytest_fp8.stats.loss import LARGE, LOSS_MARGIN, OF_ROUNDING, LossGap, LossScale, NoShare
from pytest_fp8.verdicts import Finding, Verdict, passed

ONE_CURVE = (
    "all seeds give this one curve, for neither weights nor batches depend on the seed: the spread is that of "
    "rounding, not of training"
)
OTHER_BATCHES = "draw in batch(step) with torch's generators, which are seeded for each seed and step"


def explain_gap(
    gap: LossGap,
    scale: LossScale,
    bf16: Sequence[Sequence[float]],
    noise: float,
    rounding: float = 0.0,
    one_curve: bool = False,
) -> Finding:
    """The rule's verdict with its lines. ``bf16``: the reference's losses, a curve per seed; ``noise``: how far an arm
    ends from itself one rounding apart (3 sd); ``rounding``: by how much FP8's raises the reference's own last loss;
    ``one_curve``: whether all seeds give one, and the others are its runs from weights one rounding away."""
    seen, which = _seen(gap, scale, bf16, one_curve), _which_margin(gap, scale, bf16, rounding)
    margin = scale.amount(gap.margin)
    if gap.verdict is Verdict.PASS:
        return passed(f"{seen}, margin {margin.removesuffix(' nats')}{which}{'; ' + ONE_CURVE if one_curve else ''}")
    if gap.verdict is Verdict.FAIL:
        return fail(
            C.HIGHER,
            "FP8 training ends at a higher loss than BF16",
            expected=f"less than {margin} above BF16{which}",
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
            expected=f"at most {scale.amount(gap.floor)} below BF16: FP8 adds rounding, which does not teach",
            seen=seen,
            cause="the two arms' losses are not the same quantity: a mean over fewer tokens in the FP8 arm (NaN that "
            "is masked, labels that are ignored), dropout or another regularisation that is off in it, or another "
            "learning rate",
            next_step="in a late step of each arm, count the tokens that enter the mean, and compare model.training, "
            "dropout and the optimizer's settings",
        )
    code, cause, next_step = _why_undecided(scale, bf16, noise, gap, one_curve)
    expected = f"a gap clearly below or above {margin}{which}"
    return Finding(code, Verdict.INCONCLUSIVE, "the seeds do not decide", expected, seen, cause, next_step)


def _which_margin(gap: LossGap, scale: LossScale, bf16: Sequence[Sequence[float]], rounding: float) -> str:
    """For a margin that is no number of nats: which share of the loss, and why; and what of it is room for FP8's own
    rounding. Empty for one in nats without such room."""
    if rounding:
        return (
            f" ({OF_ROUNDING * rounding:.3g} of it for FP8's rounding: BF16's own last loss rises by {rounding:.3g} "
            "where its weights are moved by as much as FP8 moves products)"
        )
    if scale.spacing and gap.margin == scale.spacing:
        return " (the loss's own type is no finer there)"
    if not scale.relative:
        return ""
    if not scale.nats and scale.value >= 1:
        return f" ({gap.margin / scale.value:.1%} of the loss, which is no cross-entropy)"
    if scale.value > 1:
        share = gap.margin / (LARGE * scale.value)
        return f" ({share:.2%} of the loss: one of {_end(bf16):.4g} is no nats of one token)"
    share_of = f"{gap.margin / scale.value:.1%} of" if scale.value else "a share of"
    return f" ({share_of} the loss, which ends below 1)"


def _seen(gap: LossGap, scale: LossScale, bf16: Sequence[Sequence[float]], one_curve: bool) -> str:
    what = f"one curve, run {len(bf16)} times one rounding apart" if one_curve else f"{len(bf16)} seeds"
    over = f"over {len(bf16[0])} steps of {what} (BF16 ends at "
    if scale.relative:
        return f"{gap.gap:+.3g} +- {gap.bound:.3g} {over}{_end(bf16):.4g})"
    return f"{gap.gap:+.4f} nats +- {gap.bound:.4f} {over}{_end(bf16):.3f})"


def _end(curves: Sequence[Sequence[float]]) -> float:
    return fmean(losses[-1] for losses in curves)


def _why_undecided(
    scale: LossScale, bf16: Sequence[Sequence[float]], noise: float, gap: LossGap, one_curve: bool
) -> tuple[C, str, str]:
    """Code, cause and next step of curves that do not decide."""
    more = f"more {'runs' if one_curve else 'seeds'}: @pytest.mark.fp8(seeds={max(8, 2 * len(bf16))})"
    if scale.why_none is NoShare.CHANGES_SIGN:
        return (
            C.CHANGES_SIGN,
            f"the reference's loss changes sign at its end and averages {scale.amount(scale.value)} there: a share "
            "of that says nothing",
            "a loss of one sign: Workload(loss=...) with a constant of the loss's size added, or an evaluation loss",
        )
    if scale.why_none is NoShare.ROUNDED_AWAY:
        return (
            C.ROUNDED_AWAY,
            f"the reference's loss ends at {scale.amount(scale.value)}, so far below where it was that the rest is "
            "rounding: a share of that says nothing",
            "fewer steps, @pytest.mark.fp8(steps=...), or data that the model does not learn by heart",
        )
    if noise > LOSS_MARGIN[1] * scale.value:
        return (
            C.TOO_NOISY,
            f"an arm against itself, one rounding apart, already ends {scale.amount(noise)} apart (3 sd), more than "
            "the largest margin",
            f"a larger batch or more steps, which average over more at the end; or {more}",
        )
    if one_curve:
        return C.MORE_SEEDS, f"its runs do not decide; {ONE_CURVE}", f"{OTHER_BATCHES}; or {more}"
    if gap.bound < gap.margin / 2:
        return C.MORE_SEEDS, "the gap lies so near the margin that its small spread includes it", more
    return C.MORE_SEEDS, "the spread between seeds is as large as the margin", more
