"""Does FP8 run in every step of a curve, and is each product as right as that layer's others? Pure."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from pytest_fp8.codes import C
from pytest_fp8.questions.findings import fail, some
from pytest_fp8.questions.loss.evidence import Look, LossEvidence, ProductCount
from pytest_fp8.verdicts import Finding

NONE = ProductCount(fp8=0, other=0)
TOO_EXACT = 0.01
"""Of the squared error of FP8 at its finest. Products of BF16 operands have a 300th of it, sound ones 0.37 and more."""
SOUND, WRONG = 0.01, 0.05
"""A layer whose products are off by at most SOUND on the median, as a share of their power, is judged: it multiplies
and does nothing besides. One product of it is wrong beyond WRONG."""
COARSE = 4.0
"""Nor is one that FP8 itself explains, as where training diverges: off by so many times what a scale for each whole
operand gives."""
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
        if lost:
            step, fewer = lost[0], f"fewer in FP8 in {len(lost)} of {len(steps)} steps: {some([str(s) for s in lost])}"
            expected = f"{calls.fp8[best]} calls of FP8 layers that multiply in FP8 in each step, as in step {best}"
            seen = f"{calls.fp8[step]} in FP8 and {calls.other[step]} others in step {step}, seed {seed}; {fewer}"
            return _lost(best, step, not calls.fp8[step], expected, seen)
    return None


def _in_the_last_step(evidence: LossEvidence) -> Finding | None:
    """Products that ran in FP8 in the first step and in another precision, or not at all, in a curve's last one.

    An expert that rests takes its products with it, so that fewer in FP8 alone are no finding: others must be more, or
    no product of that part of the step may be left in FP8.
    """
    first = evidence.fp8[min(evidence.fp8)].first_products
    for seed, curve in sorted(evidence.fp8.items()):
        for phase, before in first.items() if curve.last_products else ():
            after, last = curve.last_products.get(phase, NONE), len(curve.losses) - 1
            if not before.fp8 or (after.fp8 and not (after.fp8 < before.fp8 and after.other > before.other)):
                continue
            expected = f"{before.fp8} products in FP8 and {before.other} others in the {phase} pass, as in step 0"
            seen = f"{after.fp8} in FP8 and {after.other} others in step {last}, seed {seed}"
            return _lost(0, last, not after.fp8, expected, seen)
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
        "BF16 on purpose has to be tested with fewer steps, @pytest.mark.fp8(steps=...)",
    )


def rare_products(evidence: LossEvidence) -> Finding | None:
    """FAIL where a layer's product was wrong in some steps of a curve and right in most."""
    found = list(_wrong(evidence))
    if not found:
        return None
    layer, seed, look, usual = max(found, key=lambda one: one[2].error)
    looks = sum(len(each) for curve in evidence.fp8.values() for each in curve.calls.looks.values())
    layers = some(list(dict.fromkeys(name for name, *_ in found)))
    return fail(
        C.RARE_PRODUCT,
        "a layer's product is wrong in some steps and right in most",
        expected=f"x . W^T of {layer} off by about {usual:.1%} of its power, as in most steps",
        seen=f"{look.error:.1%} in step {look.step}, seed {seed}; "
        f"{len(found)} of {looks} products that were looked at: {layers}",
        cause="something that happens now and then: a race, a tile or row that a kernel leaves unwritten, a buffer "
        "that is used again too early, a scale of another call",
        next_step=f"run the FP8 arm's steps alone, compare {layer}'s output in each with x . W^T in float32, and print "
        "where they differ: whole tiles or rows point to the kernel; CUDA_LAUNCH_BLOCKING=1 hides a race",
    )


def _wrong(evidence: LossEvidence) -> Iterator[tuple[str, int, Look, float]]:
    """Layer, seed, the look, and the error that the layer's products have on the median."""
    curves = sorted(evidence.fp8.items())
    for layer in dict.fromkeys(name for _, curve in curves for name in curve.calls.looks):
        looks = [(seed, look) for seed, curve in curves for look in curve.calls.looks.get(layer, ())]
        usual = median([look.error for _, look in looks] or [0.0])
        if usual <= SOUND:
            for seed, look in looks:
                # A number that is not one is wrong.
                if not (look.error <= WRONG or look.of_coarsest <= COARSE):
                    yield layer, seed, look, usual
