"""Is the loss still right? Whole curves of both arms over several seeds, judged together. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pytest_fp8.evidence.records import Curve, LossEvidence
from pytest_fp8.gate.decide import decide_loss, loss_margin, tail_gap
from pytest_fp8.gate.verdicts import Decision, Verdict

QUESTION = "loss"
FIRST_STEP = 0.02
"""Largest relative difference of the first step's loss: same weights, same data, one forward pass. Measured on an H200
for Llama shapes with random weights: 0.6 % (1B) and 0.3 % (8B)."""


SHOWN = 4


def check_loss(evidence: LossEvidence, frozen_margin: Sequence[float] = ()) -> Decision:
    """Hard rules first (finite, same data, close at step 1, not bit-equal), then the gap at the end of the horizon.

    ``frozen_margin``: BF16-against-BF16 gaps stored in the baseline; without them those of this run's twin are used.
    """
    seeds = sorted(evidence.fp8)
    gaps = [tail_gap(evidence.fp8[s].losses, evidence.bf16[s].losses) for s in seeds]
    own = [tail_gap(evidence.twin[s].losses, evidence.bf16[s].losses) for s in sorted(evidence.twin)]
    margin = loss_margin(frozen_margin or own)
    numbers = {
        "gaps": gaps,
        "twin_gaps": own,
        "margin": margin,
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
    apart = [abs(evidence.fp8[s].losses[0] / evidence.bf16[s].losses[0] - 1) for s in seeds]
    if max(apart) > FIRST_STEP:
        worst = seeds[apart.index(max(apart))]
        return Decision(
            QUESTION,
            Verdict.FAIL,
            "the arms disagree at the very first step",
            expected=f"within {FIRST_STEP:.0%} of {evidence.bf16[worst].losses[0]:.4f} nats",
            seen=f"{evidence.fp8[worst].losses[0]:.4f} nats at step 1, seed {worst}",
            cause="the arms do not have the same weights or data, or a layer's scale is wrong",
            next_step="compare the two models' weights: fp8_pair.fp8.call(lambda model: ...)",
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
    gap = decide_loss(gaps, margin)
    bf16_end = sum(evidence.bf16[s].losses[-1] for s in seeds) / len(seeds)
    seen = f"{gap.gap:+.4f} nats +- {gap.bound:.4f} over {len(seeds)} seeds (BF16 ends at {bf16_end:.3f})"
    numbers |= {"gap": gap.gap, "bound": gap.bound}
    if gap.verdict is Verdict.PASS:
        return Decision(QUESTION, Verdict.PASS, f"{seen}, margin {margin:.4f}", numbers=numbers)
    if gap.verdict is Verdict.FAIL:
        return Decision(
            QUESTION,
            Verdict.FAIL,
            "FP8 training ends at a higher loss than BF16",
            expected=f"less than {margin:.4f} nats above BF16",
            seen=seen,
            cause="scales that saturate or underflow, or a recipe too coarse for this model",
            next_step="try a finer recipe (rowwise, block), then the layers question for the recipe in force",
            numbers=numbers,
        )
    return Decision(
        QUESTION,
        Verdict.INCONCLUSIVE,
        "the seeds do not decide",
        expected=f"a gap clearly below or above {margin:.4f} nats",
        seen=seen,
        cause="the spread between seeds is as large as the margin",
        next_step="more seeds: @pytest.mark.fp8(loss_seeds=8)",
        numbers=numbers,
    )


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
