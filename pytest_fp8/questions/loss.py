"""Is the loss still right? Whole curves of both arms over several seeds, judged together. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pytest_fp8.questions.records import Curve, LossEvidence
from pytest_fp8.rules.decide import LOSS_MARGIN, LossGap, loss_margin, loss_noise, tail_gap
from pytest_fp8.rules.losses import LossScale, compare_curves, loss_scale
from pytest_fp8.verdicts import Decision, Verdict

QUESTION = "loss"
FIRST_STEP = 0.02
"""Largest difference of the first step's loss, as a share of the reference's largest: same weights, same data, one
forward pass. Measured on an H200 for Llama shapes with random weights: 0.6 % (1B) and 0.3 % (8B). A language model's
first loss is its largest; one that begins near zero by chance says nothing of how far two precisions may be apart."""
FIRST_STEP_OF_BOTH_SIGNS = 0.5
"""The same where the reference's losses have both signs: they are differences of larger terms, and what a precision
changes is a share of the terms. Seen on a critic's loss in sound FP8: 0.09."""
SUMMED = 100.0
"""A loss from here on is a sum over a batch: guessing among a million tokens costs 14 nats each."""
SHOWN = 4


def check_loss(evidence: LossEvidence, frozen_margin: Sequence[float] = ()) -> Decision:
    """Hard rules first (finite, same data, close at step 1, not bit-equal), then the gap at the end of the horizon.

    ``frozen_margin``: BF16-against-BF16 gaps stored in the baseline; without them those of this run's twin are used.
    Margins are nats, and shares of the loss where the reference's ends below 1.
    """
    seeds = sorted(evidence.fp8)
    gaps = [tail_gap(evidence.fp8[s].losses, evidence.bf16[s].losses) for s in seeds]
    own = [tail_gap(evidence.twin[s].losses, evidence.bf16[s].losses) for s in sorted(evidence.twin)]
    bf16 = [evidence.bf16[s].losses for s in seeds]
    scale = loss_scale(bf16)
    numbers: dict[str, object] = {
        "gaps": gaps,
        "twin_gaps": own,
        "margin": loss_margin(frozen_margin or own, scale.value),
        "margin_scale": scale.value,
        "seeds": len(seeds),
        "steps": len(evidence.fp8[seeds[0]].losses),
    }
    for seed in seeds:
        for name, curve in (("BF16", evidence.bf16[seed]), ("FP8", evidence.fp8[seed])):
            bad = first_bad_step(curve)
            if bad is not None:
                verdict = Verdict.INVALID if name == "BF16" else Verdict.FAIL
                return _not_finite(verdict, name, seed, bad, curve, evidence.bf16[seed], numbers)
    other = [s for s in seeds if evidence.fp8[s].data != evidence.bf16[s].data]
    if other:
        return Decision(
            QUESTION,
            Verdict.FAIL,
            "the arms trained on different data",
            expected="the same batch in each step of both arms",
            seen=f"checksums {evidence.bf16[other[0]].data:08x} (BF16) and {evidence.fp8[other[0]].data:08x} (FP8), "
            f"seed {other[0]}",
            cause="batches that do not depend on seed and step alone: another seed, a shuffle, a loader's generator",
            next_step="draw the batch inside batch(step) with torch's own generators, which are seeded for each step",
            numbers=numbers,
        )
    lost = sorted({name for s in seeds for name in _untrained(evidence.fp8[s], evidence.bf16[s])})
    if lost:
        return Decision(
            QUESTION,
            Verdict.FAIL,
            f"{len(lost)} weights are in no optimizer of the FP8 arm",
            expected=f"all {len(evidence.bf16[seeds[0]].trained or ())} weights that BF16 trains",
            seen=f"never stepped: {', '.join(lost[:SHOWN])}"
            + (f" and {len(lost) - SHOWN} more" if len(lost) > SHOWN else ""),
            cause="the optimizer was made before the conversion, which put new parameters in place of its own",
            next_step="make the optimizer after the conversion; in the Trainer with torchao set "
            "ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER=false",
            numbers=numbers,
        )
    still = [s for s in seeds if _says_nothing(evidence.fp8[s].losses, evidence.bf16[s].losses)]
    if still:
        value = evidence.bf16[still[0]].losses[0] + 0.0  # -0.0 is 0
        return Decision(
            QUESTION,
            Verdict.INVALID,
            "the loss is the same number in every step",
            expected="a loss that moves as the weights do",
            seen=f"{value:.4g} in all {len(evidence.bf16[still[0]].losses)} steps of BF16, seed {still[0]}",
            cause="a loss whose gradient is what matters and whose value is none, or one that is detached or masked",
            next_step="Workload(loss=...) or step=... that gives a value to judge by, such as an evaluation loss",
            numbers=numbers,
        )
    largest = {s: max(abs(x) for x in evidence.bf16[s].losses) for s in seeds}
    apart = [abs(evidence.fp8[s].losses[0] - evidence.bf16[s].losses[0]) / largest[s] for s in seeds]
    limit = FIRST_STEP if _one_sign(bf16) else FIRST_STEP_OF_BOTH_SIGNS
    if max(apart) > limit:
        worst = seeds[apart.index(max(apart))]
        first = evidence.bf16[worst].losses[0]
        return Decision(
            QUESTION,
            Verdict.FAIL,
            "the arms disagree at the very first step",
            expected=f"within {limit:.0%} of {first:.4f} nats"
            if abs(first) == largest[worst]
            else f"{first:.4f} within {limit:.0%} of {largest[worst]:.4f}, the curve's largest loss",
            seen=f"{evidence.fp8[worst].losses[0]:.4f} nats at step 1, seed {worst}",
            cause="the arms do not have the same weights or data, or a layer's scale is wrong; or the model keeps "
            "state outside its parameters and buffers (a counter in a Python attribute), which no curve restarts; or "
            "the conversion dropped what a Linear did besides its product: a subclass's own forward, a hook",
            next_step="compare the two models' weights: fp8_pair.fp8.call(lambda model: ...); register such state as "
            "a buffer, or take the step from the batch; move such behaviour out of the Linear, or leave=(its name,)",
            numbers=numbers,
        )
    equal = [s for s in seeds if list(evidence.fp8[s].losses) == list(evidence.bf16[s].losses)]
    if equal:
        return Decision(
            QUESTION,
            Verdict.FAIL,
            "FP8 and BF16 gave bit-equal curves",
            expected="losses that differ by rounding",
            seen=f"equal in every step, seed {equal[0]}",
            cause="FP8 was off: two different precisions cannot agree to the last bit",
            next_step="run the layers question of this case",
            numbers=numbers,
        )
    gap = compare_curves([evidence.fp8[s].losses for s in seeds], bf16, frozen_margin or own)
    seen = _seen(gap, scale, bf16)
    numbers |= {"gap": gap.gap, "bound": gap.bound}
    margin = _amount(gap.margin, scale)
    which = _which_margin(gap, scale)
    if gap.verdict is Verdict.PASS:
        passed = f"{seen}, margin {margin.removesuffix(' nats')}{which}"
        return Decision(QUESTION, Verdict.PASS, passed, numbers=numbers)
    if gap.verdict is Verdict.FAIL:
        summed = _summed(bf16)
        return Decision(
            QUESTION,
            Verdict.FAIL,
            "FP8 training ends at a higher loss than BF16",
            expected=f"less than {margin} above BF16{which}",
            seen=seen,
            cause=(summed and summed + "; or ")
            + "scales that saturate or underflow, or a recipe too coarse for this model",
            next_step=("give the mean (reduction='mean'), then " if summed else "")
            + "try a finer recipe (rowwise, block), then the layers question for the recipe in force",
            numbers=numbers,
        )
    cause, next_step = _why_undecided(scale, bf16, loss_noise(frozen_margin or own))
    return Decision(
        QUESTION,
        Verdict.INCONCLUSIVE,
        "the seeds do not decide",
        expected=f"a gap clearly below or above {margin}{which}",
        seen=seen,
        cause=cause,
        next_step=next_step,
        numbers=numbers,
    )


def _says_nothing(fp8: Sequence[float], bf16: Sequence[float]) -> bool:
    """Whether the reference's loss is 0 throughout, or both arms' one and the same number, which FP8 that is off gives
    too and does not explain."""
    return not any(bf16) or (len(bf16) > 1 and len({*fp8, *bf16}) == 1)


def _one_sign(bf16: Sequence[Sequence[float]]) -> bool:
    every = [x for losses in bf16 for x in losses]
    return min(every) >= 0 or max(every) <= 0


def _amount(value: float, scale: LossScale) -> str:
    """A loss below 1 need not be one of nats, and four decimals may not show it."""
    return f"{value:.3g}" if scale.relative else f"{value:.4f} nats"


def _which_margin(gap: LossGap, scale: LossScale) -> str:
    """Where the margin is no number of nats, the share it is of the loss, and why."""
    if not scale.relative:
        return ""
    share = f"{gap.margin / scale.value:.1%} of" if scale.value else "a share of"
    return f" ({share} the loss, which ends below 1)"


def _seen(gap: LossGap, scale: LossScale, bf16: Sequence[Sequence[float]]) -> str:
    end = sum(losses[-1] for losses in bf16) / len(bf16)
    over = f"over {len(bf16)} seeds (BF16 ends at "
    if scale.relative:
        return f"{gap.gap:+.3g} +- {gap.bound:.3g} {over}{end:.3g})"
    return f"{gap.gap:+.4f} nats +- {gap.bound:.4f} {over}{end:.3f})"


def _summed(bf16: Sequence[Sequence[float]]) -> str:
    """Says so where the loss is too large to be one token's."""
    end = sum(losses[-1] for losses in bf16) / len(bf16)
    if abs(end) < SUMMED:
        return ""
    return f"the loss is of the size of {end:.0f}, a sum over the batch, and margins are nats per token"


def _why_undecided(scale: LossScale, bf16: Sequence[Sequence[float]], noise: float) -> tuple[str, str]:
    """Cause and next step of curves that do not decide."""
    more = f"more seeds: @pytest.mark.fp8(loss_seeds={max(8, 2 * len(bf16))})"
    summed = _summed(bf16)
    if summed:
        return summed, "give the mean: reduction='mean', or divide by the number of targets"
    if scale.why_none == "changes sign":
        return (
            f"the reference's loss changes sign at its end and averages {_amount(scale.value, scale)} there: a share "
            "of that says nothing",
            "a loss of one sign: Workload(loss=...) with a constant of the loss's size added, or an evaluation loss",
        )
    if scale.why_none:
        return (
            f"the reference's loss ends at {_amount(scale.value, scale)}, so far below where it was that the rest is "
            "rounding: a share of that says nothing",
            "fewer steps, @pytest.mark.fp8(loss_steps=...), or data that the model does not learn by heart",
        )
    if noise > LOSS_MARGIN[1] * scale.value:
        return (
            f"BF16 against itself, one rounding apart, already ends {_amount(noise, scale)} apart (3 sd), more than "
            "the largest margin",
            f"a larger batch or more steps, which average over more at the end; or {more}",
        )
    return "the spread between seeds is as large as the margin", more


def _untrained(fp8: Curve, bf16: Curve) -> set[str]:
    """What the reference trains and the FP8 arm does not; nothing where an arm did not say what it trains."""
    if fp8.trained is None or bf16.trained is None:
        return set()
    return set(bf16.trained) - set(fp8.trained)


def first_bad_step(curve: Curve) -> int | None:
    """Index of the first step whose loss or gradient norm is not finite."""
    for index, pair in enumerate(zip(curve.losses, curve.gradient_norms, strict=True)):
        if not all(math.isfinite(value) for value in pair):
            return index
    return None


def _not_finite(
    verdict: Verdict, name: str, seed: int, step: int, curve: Curve, bf16: Curve, numbers: dict[str, object]
) -> Decision:
    what = "loss" if not math.isfinite(curve.losses[step]) else "gradient norm"
    value = curve.losses[step] if what == "loss" else curve.gradient_norms[step]
    before = f"; the loss was {curve.losses[step - 1]:.4f} the step before" if step else ""
    return Decision(
        QUESTION,
        verdict,
        f"the {name} arm's {what} is not finite from step {step + 1} on",
        expected=f"finite numbers in all {len(curve.losses)} steps"
        + (f" (BF16: {bf16.losses[step]:.4f})" if name == "FP8" else ""),
        seen=f"{what} = {value} at step {step + 1}, seed {seed}{before}",
        cause="an FP8 value that overflowed to NaN: e4m3 has no infinity"
        if name == "FP8"
        else "the training itself diverges, with FP8 having no part in it",
        next_step="save the batch and the weights of that step, and look at the largest activation per layer"
        if name == "FP8"
        else "lower the learning rate or mend the data; FP8 cannot be judged on this",
        numbers={**numbers, "first_bad_step": step + 1},
    )
