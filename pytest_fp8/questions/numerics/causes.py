"""Which gradients are wrong, and why: what the evidence of the same step says of it, most telling first. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from pytest_fp8.case import Case
from pytest_fp8.codes import Code, D, N
from pytest_fp8.questions.findings import finding, some
from pytest_fp8.questions.numerics.evidence import NumericsEvidence
from pytest_fp8.questions.numerics.gradients import Difference
from pytest_fp8.questions.numerics.limits import Limits
from pytest_fp8.verdicts import Finding

SMALL_LENGTH = 0.2
"""Of a gradient over BF16's, where what arrives is a small part of it."""
LEAST_GAIN, LEAST_FACTOR = 0.02, 0.1
"""A gain below the one is no factor but nothing that arrives; one nearer to 1 than the other explains no difference
that fails."""
MANY_LOST = 0.2
"""Share of an operand's values that the recipe's own casts make 0, from which that is the cause."""


def find_in_gradients(
    case: Case, evidence: NumericsEvidence, found: Sequence[Difference], limits: Limits
) -> Finding | None:
    """FAIL names the first wrong gradient of the backward pass: where the error begins."""
    wrong = [d for d in found if d.wrong(limits)]
    if not wrong:
        return None
    first, index = wrong[0], found.index(wrong[0])
    before = f"the last right one in backward order is {found[index - 1].parameter}'s" if index else "it is the first"
    code, given = next(_causes(evidence, limits, wrong))
    why = finding(
        code,
        f"{first.expected(limits)} at the same weights and batch: weights that are moved as much as FP8 moves "
        f"products change it by {first.moved:.1%}",
        f"{first.parameter}: {first.gain:.2f} times BF16's, {first.relative:.1%} off, cosine {first.cosine:.3f}; "
        f"{before}" + (f"; also {some([d.parameter for d in wrong[1:]])}" if len(wrong) > 1 else ""),
        about=first.parameter,
        count=len(wrong),
        of=len(found),
        **given,
    )
    if not case.compile or case.emulated:
        return why
    compiled = "The layers' products are right when run uncompiled: ask again with `compile=False` in the mark."
    return replace(why, next_step=f"{why.next_step} {compiled}")


def _causes(
    evidence: NumericsEvidence, limits: Limits, wrong: Sequence[Difference]
) -> Iterator[tuple[Code, dict[str, Any]]]:
    """Code, and what its words leave open, in the order of the backward pass."""
    first = wrong[0]
    if not math.isfinite(first.relative):
        yield N.GRADIENT_NOT_FINITE, {}
    if evidence.fp8.gradients.random != evidence.bf16.gradients.random:
        yield D.OTHER_RANDOM_NUMBERS, {}
    if all(d.parameter.rpartition(".")[2] == "bias" for d in wrong):
        # What the backward pass hands on and multiplies is right.
        yield N.BIAS_GRADIENT, {}
    if abs(first.gain) >= LEAST_GAIN and abs(first.gain - 1) > LEAST_FACTOR and first.rest <= first.limit(limits):
        yield N.GRADIENT_TIMES, {"factor": first.gain}
    worst = max(evidence.fp8.products, key=lambda product: product.underflow, default=None)
    if worst is not None and worst.underflow >= MANY_LOST:
        yield N.OUTLIER, {"underflow": worst.underflow, "where": f"{worst.role} of {worst.layer}"}
    if first.length < SMALL_LENGTH:
        yield N.GRADIENT_MISSING, {"length": first.length}
    yield N.OTHER_GRADIENT, {}
