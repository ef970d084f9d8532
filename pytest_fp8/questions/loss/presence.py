"""Does FP8 run in every step of a curve? Calls of the FP8 layers step by step, and the products of the first and the
last step. Pure."""

from __future__ import annotations

from pytest_fp8.codes import C
from pytest_fp8.questions.findings import fail, some
from pytest_fp8.questions.loss.evidence import LossEvidence, ProductCount
from pytest_fp8.verdicts import Finding

NONE = ProductCount(fp8=0, other=0)
TOO_EXACT = 0.01
"""Of the squared error of FP8 at its finest. Products of BF16 operands have a 300th of it, sound ones 0.37 and more."""
SWITCHED_OFF = (
    "something switched FP8 off while the arm trained: a schedule, a callback, a mode that changed (eval, no_grad), or "
    "a fallback, after a value that was not finite or was too large"
)


def fp8_lost_on_the_way(evidence: LossEvidence) -> Finding | None:
    """FP8 that ran in one step of a curve and not, or less, in another."""
    return _in_some_step(evidence) or _too_exact(evidence) or _in_the_last_step(evidence)


def _too_exact(evidence: LossEvidence) -> Finding | None:
    """An FP8 layer's product of one step that is nearer to the exact one than FP8 can be: its casts were left out. The
    function that multiplies in FP8 does not show it, since libraries run the same one with casts switched off."""
    looks = [
        (look.of_finest, layer, seed, look.step)
        for seed, curve in sorted(evidence.fp8.items())
        for layer, taken in curve.calls.looks.items()
        for look in taken
    ]
    found = sorted(look for look in looks if look[0] < TOO_EXACT)
    if not found:
        return None
    share, layer, seed, step = found[0]
    return fail(
        C.TOO_EXACT,
        "an FP8 layer multiplied in high precision while the arm trained",
        expected=f"products of {layer} off by as much as FP8 with a scale for each row and column gives",
        seen=f"{share:.1%} of that error in step {step}, seed {seed}; "
        f"{len(found)} of {len(looks)} products that were looked at: {some(list(dict.fromkeys(f[1] for f in found)))}",
        cause=SWITCHED_OFF,
        next_step=f"print in each step what {layer} casts its operands to",
    )


def _in_some_step(evidence: LossEvidence) -> Finding | None:
    """Layers whose calls multiplied in FP8 in one step and in another precision in another, in the forward pass.

    An expert that rests takes its calls with it: fewer in FP8 alone are no finding, others must be more.
    """
    for seed in sorted(evidence.fp8):
        calls = evidence.fp8[seed].calls
        steps = range(len(calls.fp8))
        best = max(steps, key=lambda step: (calls.fp8[step], -calls.other[step]), default=0)
        lost = [s for s in steps if calls.fp8[s] < calls.fp8[best] and calls.other[s] > calls.other[best]]
        if not lost:
            continue
        step = lost[0]
        return _lost(
            best,
            step,
            nothing_left=not calls.fp8[step],
            expected=f"{calls.fp8[best]} calls of FP8 layers that multiply in FP8 in each step, as in step {best}",
            seen=f"{calls.fp8[step]} in FP8 and {calls.other[step]} others in step {step}, seed {seed}; fewer in FP8 "
            f"in {len(lost)} of {len(steps)} steps: {some([str(s) for s in lost])}",
        )
    return None


def _in_the_last_step(evidence: LossEvidence) -> Finding | None:
    """Products that ran in FP8 in the first step and in another precision, or not at all, in a curve's last one.

    An expert that rests takes its products with it, so that fewer in FP8 alone are no finding: others must be more, or
    no product of that part of the step may be left in FP8.
    """
    seeds = sorted(evidence.fp8)
    first = evidence.fp8[seeds[0]].first_products
    for seed in seeds:
        curve = evidence.fp8[seed]
        last = len(curve.losses) - 1
        if not curve.last_products:
            continue
        for phase, before in first.items():
            after = curve.last_products.get(phase, NONE)
            if not before.fp8 or (after.fp8 and not (after.fp8 < before.fp8 and after.other > before.other)):
                continue
            return _lost(
                0,
                last,
                nothing_left=not after.fp8,
                expected=f"{before.fp8} products in FP8 and {before.other} others in the {phase} pass, as in step 0",
                seen=f"{after.fp8} in FP8 and {after.other} others in step {last}, seed {seed}",
            )
    return None


def _lost(before: int, step: int, nothing_left: bool, expected: str, seen: str) -> Finding:
    return fail(
        C.FP8_LOST,
        f"FP8 ran in step {before} and not in step {step}"
        if nothing_left
        else f"less ran in FP8 in step {step} than in step {before}",
        expected=expected,
        seen=seen,
        cause=SWITCHED_OFF,
        next_step="print the step at which FP8 is switched off, counted from 0 as in batch(step); a plan that ends in "
        "BF16 on purpose has to be tested with fewer steps, @pytest.mark.fp8(loss_steps=...)",
    )
