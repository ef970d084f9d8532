"""The words for a loss gap: what was seen against which margin, the likely cause, what to do. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_fp8.codes import UNCODED
from pytest_fp8.rules.loss import LARGE, LOSS_MARGIN, OF_ROUNDING, LossGap, LossScale
from pytest_fp8.verdicts import Finding, Verdict

RISES = 2.0
"""Of its first value, by which a loss may rise to its end without being said to diverge."""


def explain_gap(
    gap: LossGap, scale: LossScale, bf16: Sequence[Sequence[float]], noise: float, rounding: float = 0.0
) -> Finding:
    """The rule's verdict with its lines. ``bf16``: the reference's losses, a curve per seed; ``noise``: how far an arm
    ends from itself one rounding apart (3 sd); ``rounding``: by how much FP8's raises the reference's own last loss."""
    seen, which = _seen(gap, scale, bf16), _which_margin(gap, scale, bf16, rounding)
    margin = _amount(gap.margin, scale)
    if gap.verdict is Verdict.PASS:
        return Finding(UNCODED, Verdict.PASS, headline=f"{seen}, margin {margin.removesuffix(' nats')}{which}")
    if gap.verdict is Verdict.FAIL:
        return Finding(
            UNCODED,
            Verdict.FAIL,
            headline="FP8 training ends at a higher loss than BF16",
            expected=f"less than {margin} above BF16{which}",
            seen=seen,
            cause="scales that saturate or underflow, or a recipe too coarse for this model; or a fault that begins "
            "after the first steps, such as weights or inputs that an FP8 layer keeps from an earlier step",
            next_step="ask assert_numerics(), which looks at the products after some training, too; if they are "
            "right, leave sensitive layers in BF16, or try a recipe with finer scales",
        )
    if gap.below:
        return _below(gap, scale, seen)
    cause, next_step = _why_undecided(scale, bf16, noise, gap.bound, gap.margin)
    return Finding(
        UNCODED,
        Verdict.INCONCLUSIVE,
        headline="the seeds do not decide",
        expected=f"a gap clearly below or above {margin}{which}",
        seen=seen,
        cause=cause,
        next_step=next_step,
    )


def _below(gap: LossGap, scale: LossScale, seen: str) -> Finding:
    return Finding(
        UNCODED,
        Verdict.INCONCLUSIVE,
        headline="FP8 training ends at a lower loss than BF16, by more than noise",
        expected=f"at most {_amount(gap.floor, scale)} below BF16: FP8 adds rounding, which does not teach",
        seen=seen,
        cause="the two arms' losses are not the same quantity: a mean over fewer tokens in the FP8 arm (NaN that is "
        "masked, labels that are ignored), dropout or another regularisation that is off in it, or another learning "
        "rate",
        next_step="in a late step of each arm, count the tokens that enter the mean, and compare model.training, "
        "dropout and the optimizer's settings",
    )


def _amount(value: float, scale: LossScale) -> str:
    """A loss below 1 or above 10 need not be in nats, and four decimals may not show it."""
    return f"{value:.3g}" if scale.relative else f"{value:.4f} nats"


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
        return (
            f" ({gap.margin / (LARGE * scale.value):.2%} of the loss: one of {_end(bf16):.4g} is no nats of one token)"
        )
    share = f"{gap.margin / scale.value:.1%} of" if scale.value else "a share of"
    return f" ({share} the loss, which ends below 1)"


def _seen(gap: LossGap, scale: LossScale, bf16: Sequence[Sequence[float]]) -> str:
    over = f"over {len(bf16)} seeds (BF16 ends at "
    if scale.relative:
        return f"{gap.gap:+.3g} +- {gap.bound:.3g} {over}{_end(bf16):.4g})"
    return f"{gap.gap:+.4f} nats +- {gap.bound:.4f} {over}{_end(bf16):.3f})"


def _end(bf16: Sequence[Sequence[float]]) -> float:
    return sum(losses[-1] for losses in bf16) / len(bf16)


def _why_undecided(
    scale: LossScale, bf16: Sequence[Sequence[float]], noise: float, bound: float, margin: float
) -> tuple[str, str]:
    """Cause and next step of curves that do not decide."""
    more = f"more seeds: @pytest.mark.fp8(loss_seeds={max(8, 2 * len(bf16))})"
    if scale.why_none == "changes sign":
        return (
            f"the reference's loss changes sign at its end and averages {_amount(scale.value, scale)} there: a share "
            "of that says nothing",
            "a loss of one sign: Workload(loss=...) with a constant of the loss's size added, or an evaluation loss",
        )
    begin, end = (sum(losses[at] for losses in bf16) / len(bf16) for at in (0, -1))
    if end > begin + RISES * abs(begin):
        return (
            f"the reference's own loss rises, from {begin:.3g} at its first step to {end:.3g} at its last: its "
            "training diverges, or does not lower this loss",
            "a smaller learning rate, Workload(learning_rate=...), or one that warms up; or another loss",
        )
    if scale.why_none:
        return (
            f"the reference's loss ends at {_amount(scale.value, scale)}, so far below where it was that the rest is "
            "rounding: a share of that says nothing",
            "fewer steps, @pytest.mark.fp8(loss_steps=...), or data that the model does not learn by heart",
        )
    if noise > LOSS_MARGIN[1] * scale.value:
        return (
            f"an arm against itself, one rounding apart, already ends {_amount(noise, scale)} apart (3 sd), more than "
            "the largest margin",
            f"a larger batch or more steps, which average over more at the end; or {more}",
        )
    if bound < margin / 2:
        return "the gap lies so near the margin that its small spread includes it", more
    return "the spread between seeds is as large as the margin", more
