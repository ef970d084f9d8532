"""Is each product of a curve as right as that layer's others? Few values of few products of each step. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from pytest_fp8.codes import C
from pytest_fp8.questions.findings import fail, some
from pytest_fp8.questions.loss.evidence import Look, LossEvidence
from pytest_fp8.verdicts import Finding

SOUND, WRONG = 0.01, 0.05
"""A layer whose products are off by at most SOUND on the median, as a share of their power, is judged: it multiplies
and does nothing besides. One product of it is wrong beyond WRONG."""
COARSE = 4.0
"""Nor is one that FP8 itself explains, as where training diverges: off by so many times what a scale for each whole
operand gives."""


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
