"""Does FP8 run in every step of a curve, and is each product as right as that layer's others? Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from statistics import median

from pytest_fp8.codes import C
from pytest_fp8.questions.findings import finding, some
from pytest_fp8.questions.loss.evidence import Curve, Look, LossEvidence, ProductCount
from pytest_fp8.verdicts import Finding

TOO_EXACT = 0.01
"""Of the squared error of FP8 at its finest. Products of BF16 operands have a 300th of it, sound ones 0.37 and more."""
SOUND, WRONG = 0.01, 0.05
"""A layer whose products are off by at most SOUND on the median, as a share of their power, is judged: it multiplies
and does nothing besides. One product of it is wrong beyond WRONG."""
COARSE = 4.0
"""Nor is one that FP8 itself explains, as where training diverges: off by so many times what a scale for each whole
operand gives."""
CALLS = "calls of FP8 layers"


def fp8_lost_on_the_way(evidence: LossEvidence) -> Finding | None:
    """FP8 that ran in one step of a curve and not, or less, in another."""
    return _lost(evidence, _calls) or _too_exact(evidence) or _lost(evidence, _products)


Counts = Iterator[tuple[str, dict[int, ProductCount]]]
"""What is counted, and by step."""


def _calls(curve: Curve, evidence: LossEvidence) -> Counts:
    """Of the forward pass, in each step."""
    counts = zip(curve.calls.fp8, curve.calls.other, strict=True)
    yield CALLS, {step: ProductCount(*count) for step, count in enumerate(counts)}


def _products(curve: Curve, evidence: LossEvidence) -> Counts:
    """Of the first step of all curves, and of this one's last."""
    first = evidence.fp8[min(evidence.fp8)].first_products
    for phase, before in first.items() if curve.last_products else ():
        last = curve.last_products.get(phase, ProductCount(fp8=0, other=0))
        yield f"products of the {phase} pass", {0: before, len(curve.losses) - 1: last}


def _lost(evidence: LossEvidence, counted: Callable[[Curve, LossEvidence], Counts]) -> Finding | None:
    """An expert that rests takes its calls and products with it: fewer in FP8 alone are no finding, others must be
    more, or no product of that part of the step may be left in FP8."""
    for seed, curve in sorted(evidence.fp8.items()):
        for what, counts in counted(curve, evidence):
            best = max(counts, key=lambda step: (counts[step].fp8, -counts[step].other), default=0)
            fewer = [step for step, count in counts.items() if count.fp8 < counts[best].fp8]
            none = {step for step in fewer if what != CALLS and not counts[step].fp8}
            if lost := [step for step in fewer if step in none or counts[step].other > counts[best].other]:
                now, most, step = counts[lost[0]], counts[best], lost[0]
                expected = f"{most.fp8} {what} in FP8 and {most.other} others, as in step {best}"
                seen = f"{now.fp8} in FP8 and {now.other} others in step {step}, seed {seed}; fewer in FP8 "
                seen += f"in {len(lost)} of {len(curve.losses)} steps: {some([str(each) for each in lost])}"
                return finding(C.FP8_LOST, expected, seen, step=step, best=best)
    return None


def _too_exact(evidence: LossEvidence) -> Finding | None:
    """An FP8 layer's product of one step that is nearer to the exact one than FP8 can be: its casts were left out. The
    function that multiplies in FP8 does not show it, since libraries run the same one with casts switched off."""
    looks = list(_looks(evidence))
    found = [(look.of_finest, layer, seed, look.step) for layer, seed, look in looks if look.of_finest < TOO_EXACT]
    if not found:
        return None
    share, layer, seed, step = min(found)
    seen = f"{share:.1%} of that error in step {step}, seed {seed}; {len(found)} of {len(looks)} products that were "
    seen += f"looked at: {some({name for _, name, *_ in found})}"
    expected = f"products of {layer} off by as much as FP8 with a scale for each row and column gives"
    return finding(C.TOO_EXACT, expected, seen, about=layer)


def rare_products(evidence: LossEvidence) -> Finding | None:
    """FAIL where a layer's product was wrong in some steps of a curve and right in most."""
    looks = list(_looks(evidence))
    usual = {name: median([look.error for layer, _, look in looks if layer == name]) for name, *_ in looks}
    # A number that is not one is wrong.
    found = [
        (layer, seed, look)
        for layer, seed, look in looks
        if usual[layer] <= SOUND and not (look.error <= WRONG or look.of_coarsest <= COARSE)
    ]
    if not found:
        return None
    layer, seed, look = max(found, key=lambda one: one[2].error if math.isfinite(one[2].error) else math.inf)
    expected = f"x . W^T of {layer} off by about {usual[layer]:.1%} of its power, as in most steps"
    seen = f"{look.error:.1%} in step {look.step}, seed {seed}; {len(found)} of {len(looks)} products that were looked "
    seen += f"at: {some({name for name, *_ in found})}"
    return finding(C.RARE_PRODUCT, expected, seen, about=layer)


def _looks(evidence: LossEvidence) -> Iterator[tuple[str, int, Look]]:
    """Layer, seed and look."""
    for seed, curve in sorted(evidence.fp8.items()):
        for layer, looks in curve.calls.looks.items():
            yield from ((layer, seed, look) for look in looks)
