"""Is the loss still right? Whole curves of both arms over several seeds, judged together. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pytest_fp8.codes import C, D
from pytest_fp8.questions.findings import fail
from pytest_fp8.questions.loss.course import trained_otherwise
from pytest_fp8.questions.loss.evidence import Curve, LossEvidence
from pytest_fp8.questions.loss.first_step import first_step
from pytest_fp8.questions.loss.gap import explain_gap
from pytest_fp8.questions.loss.learning import (
    least_moved,
    moved_share,
    nothing_learnt,
    weights_move_less,
    weights_stand_still,
)
from pytest_fp8.questions.loss.presence import fp8_lost_on_the_way, rare_products
from pytest_fp8.questions.loss.restart import does_not_restart
from pytest_fp8.stats.loss import LossGap, compare_curves, loss_margin, loss_noise, loss_scale, tail_gap
from pytest_fp8.verdicts import Decision, Figures, Finding, Verdict

QUESTION = "loss"
COARSE = 2**-10
"""Spacing at 1 of float16; that of bfloat16 is larger, that of float32 far smaller."""


def judge_gap(evidence: LossEvidence, frozen_margin: Sequence[float] = ()) -> LossGap:
    """The rule alone: is the gap at the end of the horizon above the margin? Curves must be finite."""
    fp8, bf16 = ([arm[s].losses for s in sorted(evidence.fp8)] for arm in (evidence.fp8, evidence.bf16))
    twins, own = frozen_margin or _gaps(evidence.twin, evidence.bf16), _gaps(evidence.fp8_twin, evidence.fp8)
    gap = compare_curves(fp8, bf16, twins, own, evidence.eps, evidence.nats, rounding=evidence.rounding)
    if evidence.unfinished and gap.verdict is Verdict.FAIL:
        return replace(gap, verdict=Verdict.INCONCLUSIVE)
    return gap


@dataclass(frozen=True)
class LossFigures(Figures):
    """Losses in nats, or in the unit of the user's own loss; gaps by seed, or by run of one curve, which is one of
    ``seeds``; ``moved`` as shares of the weights with a gradient; ``first_bad_step`` counted from 0."""

    gaps: Sequence[float]
    twin_gaps: Sequence[float]
    fp8_twin_gaps: Sequence[float]
    margin: float
    rounding: float
    margin_scale: float
    seeds: int
    steps: int
    moved: float | None
    fp8_moved: float | None
    least_moved: float
    gap: float | None = None
    bound: float | None = None
    first_bad_step: int | None = None


def check_loss(evidence: LossEvidence, frozen_margin: Sequence[float] = (), gap: LossGap | None = None) -> Decision:
    """Hard rules first (finite, same data, curves that begin anew, trained alike, close at step 1, not bit-equal, FP8
    to the end), then the gap. Where that does not fail, the reference must have learnt something.

    ``frozen_margin``: BF16-against-BF16 gaps stored in the baseline; without them those of this run's twin are used.
    Margins are nats, and shares of the loss where the reference's ends below 1 or above 10. ``gap``: the answer of
    :func:`judge_gap` where it is known.
    """
    seeds = sorted(evidence.fp8)
    own, fp8_own = _gaps(evidence.twin, evidence.bf16), _gaps(evidence.fp8_twin, evidence.fp8)
    scale = evidence.scale
    figures = LossFigures(
        gaps=_gaps(evidence.fp8, evidence.bf16),
        twin_gaps=own,
        fp8_twin_gaps=fp8_own,
        margin=loss_margin(frozen_margin or own, scale, fp8_own, evidence.rounding),
        rounding=evidence.rounding,
        margin_scale=scale.value,
        seeds=1 if evidence.one_curve else len(seeds),
        steps=len(evidence.fp8[seeds[0]].losses),
        moved=moved_share(evidence.bf16),
        fp8_moved=moved_share(evidence.fp8),
        least_moved=least_moved(evidence),
    )
    for name, curve in _in_turn(evidence):
        step = first_bad_step(curve)
        if step is not None:
            found = not_finite(name, step, curve, evidence.bf16[curve.seed])
            return found.answer(QUESTION, replace(figures, first_bad_step=step))
    for rule in (
        *(_other_data, constant, does_not_restart, trained_otherwise, weights_stand_still, first_step),
        *(curves_equal, fp8_lost_on_the_way, rare_products),
    ):
        if broken := rule(evidence):
            return broken.answer(QUESTION, figures)
    gap = gap or judge_gap(evidence, frozen_margin)
    noise = max(loss_noise(frozen_margin or own), loss_noise(fp8_own))
    bf16 = [evidence.bf16[s].losses for s in seeds]
    found = explain_gap(gap, scale, bf16, noise, evidence.rounding, evidence.one_curve)
    if gap.verdict is not Verdict.FAIL and not gap.below and not scale.why_none:
        found = weights_move_less(evidence) or nothing_learnt(evidence) or found
    return found.answer(QUESTION, replace(figures, gap=gap.gap, bound=gap.bound))


def _gaps(arm: Mapping[int, Curve], other: Mapping[int, Curve]) -> list[float]:
    """By seed. A twin's to its own arm are those of one rounding."""
    return [tail_gap(arm[s].losses, other[s].losses) for s in sorted(arm)]


def _in_turn(evidence: LossEvidence) -> Iterator[tuple[str, Curve]]:
    """Arm and curve, seed by seed, the reference's first. A twin shows what its arm does with weights one rounding
    away."""
    arms = (("BF16", evidence.bf16), ("BF16", evidence.twin), ("FP8", evidence.fp8), ("FP8", evidence.fp8_twin))
    for seed in sorted(evidence.fp8):
        yield from ((name, curves[seed]) for name, curves in arms if seed in curves)


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
    return fail(
        D.OTHER_DATA,
        "the arms trained on different data",
        expected="the same batch in each step of both arms",
        seen=f"checksums {evidence.bf16[seed].data:08x} (BF16) and {evidence.fp8[seed].data:08x} (FP8), seed {seed}",
        cause="batches that do not depend on seed and step alone: another seed, a shuffle, a loader's generator",
        next_step="draw the batch inside batch(step) with torch's own generators, which are seeded for each step",
    )


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
                f"the loss is computed in a type of 16 bits, whose numbers are "
                f"{loss_scale([bf16], evidence.eps).spacing:.2g} apart there: these steps move it by less; or its "
                "value is constant and only its gradient is used"
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
