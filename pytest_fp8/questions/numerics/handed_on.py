"""Judges what optimizers are given of weight gradients, beside what the products gave: as in BF16. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from pytest_fp8.codes import N
from pytest_fp8.questions.findings import finding, some
from pytest_fp8.questions.numerics.evidence import LATER, HandedOn, NumericsEvidence
from pytest_fp8.verdicts import Finding

SAME = 0.999
"""Cosine from which the reference's optimizer is given what the products gave, times a factor."""
ANOTHER = 0.98
"""Cosine below which an FP8 layer's is something else: docs/limits.md."""
COMMON = 0.005
"""The reference's factors lie this close together where one is common to all layers: clipping by the whole norm."""
FACTOR = 0.02
"""An FP8 layer's factor may differ from the common one by this."""
LEAST_LAYERS = 3
"""To tell one layer's factor from that of all."""


class _Pair(NamedTuple):
    layer: str
    mine: HandedOn
    reference: HandedOn


def find_in_handed_on(evidence: NumericsEvidence) -> Finding | None:
    """FAIL names the layers whose weight gradients something changes in the FP8 arm alone, between the backward pass
    and ``optimizer.step()``."""
    first = _find(evidence.fp8.handed_on, evidence.bf16.handed_on, "")
    return first or _find(evidence.fp8.handed_on_later, evidence.bf16.handed_on_later, f" after {LATER} training steps")


def _find(mine: Sequence[HandedOn], reference: Sequence[HandedOn], when: str) -> Finding | None:
    pairs = _paired(mine, reference)
    others = [pair for pair in pairs if not pair.mine.cosine >= ANOTHER]
    scaled = [] if others else _scaled(pairs)
    if not (others or scaled):
        return None
    worst = min(others, key=lambda pair: pair.mine.cosine) if others else scaled[0]
    middle = median(pair.mine.factor for pair in pairs)
    seen = f"times {worst.mine.factor:.3f}, of the other layers {middle:.3f}"
    seen = f"cosine {worst.mine.cosine:.3f}, BF16's {worst.reference.cosine:.3f}" if others else seen
    also = [pair.layer for pair in others or scaled if pair.layer != worst.layer]
    return finding(
        N.GRADIENT_REPLACED if others else N.GRADIENT_SCALED,
        "the sum of dy^T . x over the step's calls, times one factor for all layers, as in BF16",
        f"{worst.layer}: {seen}" + (f"; also {some(also)}" if also else ""),
        count=len(others or scaled),
        when=when,
    )


def _paired(mine: Sequence[HandedOn], reference: Sequence[HandedOn]) -> list[_Pair]:
    """Of layers that have as many in both arms: those of the same calls of ``optimizer.step()``, where the reference's
    optimizer is given what the products gave."""
    pairs: list[_Pair] = []
    for layer in dict.fromkeys(each.layer for each in mine):
        own, other = ([each for each in arm if each.layer == layer] for arm in (mine, reference))
        if len(own) == len(other):
            pairs += [_Pair(layer, *both) for both in zip(own, other, strict=True) if both[1].cosine >= SAME]
    return pairs


def _scaled(pairs: Sequence[_Pair]) -> list[_Pair]:
    common = median(pair.reference.factor for pair in pairs) if len(pairs) >= LEAST_LAYERS else 0.0
    if not common or any(abs(pair.reference.factor / common - 1) > COMMON for pair in pairs):
        return []
    mine = median(pair.mine.factor for pair in pairs)
    # Clipping by each layer's norm, or each group's, that BF16 stays below: no factor is smaller than the norms' own.
    clipped = min(pair.reference.length / pair.mine.length for pair in pairs) * (1 - FACTOR)
    off = [(pair, pair.mine.factor / mine if mine else 0.0) for pair in pairs]
    return [pair for pair, factor in off if not (abs(factor - 1) <= FACTOR or clipped <= factor < 1)]
