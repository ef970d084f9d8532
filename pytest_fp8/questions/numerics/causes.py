"""Why gradients are wrong: what the evidence of the same step says of it, most telling first. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from pytest_fp8.codes import Code, D, N
from pytest_fp8.questions.findings import fail, some
from pytest_fp8.questions.numerics.evidence import NumericsEvidence
from pytest_fp8.questions.numerics.gradients import Difference
from pytest_fp8.questions.numerics.limits import Limits
from pytest_fp8.verdicts import Finding

NO_LENGTH, SMALL_LENGTH = 0.02, 0.2
"""Of a gradient over BF16's, where nothing arrives; and where what arrives is a small part of the loss."""
LEAST_FACTOR = 0.1
"""A gain that is nearer to 1 explains no difference that fails."""
MANY_LOST = 0.2
"""Share of an operand's values that the recipe's own casts make 0, from which that is the cause."""

Cause = tuple[Code, str, str]
"""Code, cause, and the next step where it is no comparison of the gradient."""


def cause_of(evidence: NumericsEvidence, limits: Limits, wrong: Sequence[Difference]) -> Finding:
    """The cause of the wrong gradients, in the order of the backward pass."""
    code, cause, next_step = next(_causes(evidence, limits, wrong))
    return fail(code, "", cause=cause, next_step=next_step)


def _causes(evidence: NumericsEvidence, limits: Limits, wrong: Sequence[Difference]) -> Iterator[Cause]:
    first, name = wrong[0], wrong[0].parameter
    if not math.isfinite(first.relative):
        yield N.GRADIENT_NOT_FINITE, f"the gradient of {name} is not finite in the FP8 arm", ""
    if evidence.fp8.gradients.random != evidence.bf16.gradients.random:
        cause = (
            "the arms draw other random numbers in this step, so that these are gradients of other dropout masks or "
            "other noise: a generator is seeded again inside the step, or recomputation does not restore it"
        )
        then = "ask fp8_pair.assert_layers(), which names the first operator that draws others"
        yield D.OTHER_RANDOM_NUMBERS, cause, then
    times = _times(first, limits)
    if all(d.parameter.rpartition(".")[2] == "bias" for d in wrong):
        # What the backward pass hands on and multiplies is right.
        what = (
            f"no gradient arrives at {name} in the FP8 arm: its layer leaves it out of its output, or detaches it"
            if first.length < NO_LENGTH
            else f"{times or f'another sum arrives at {name} in the FP8 arm'}: a sum over the rows that is a mean, "
            "misses rows, or is kept too coarsely"
        )
        names = some([d.parameter for d in wrong])
        yield N.BIAS_GRADIENT, f"only gradients of biases are wrong ({names}): {what}", ""
    if times:
        yield N.GRADIENT_TIMES, times, ""
    worst = max(evidence.fp8.products, key=lambda product: product.underflow, default=None)
    if worst is not None and worst.underflow >= MANY_LOST:
        cause = (
            f"the recipe's own casts make {worst.underflow:.0%} of an operand's values 0 in {worst.role} of "
            f"{worst.layer}: far larger values set the scale, as padding does that holds large numbers. The layers "
            "multiply as promised"
        )
        yield N.OUTLIER, cause, "set pad rows to 0, or take a recipe that scales each row by itself, recipe='rowwise'"
    if first.length < SMALL_LENGTH:
        almost = "" if first.length < NO_LENGTH else "almost "
        length = f": {first.length:.2g} times BF16's length" if almost else ""
        yield N.GRADIENT_MISSING, f"{almost}no gradient arrives at {name} in the FP8 arm{length}", ""
    yield (
        N.OTHER_GRADIENT,
        f"the backward pass of the FP8 arm computes something else from {name} on: a part of the tokens or values is "
        "lost, operands are wrong, or a gradient is summed or stored too coarsely",
        "",
    )


def _times(first: Difference, limits: Limits) -> str:
    if abs(first.gain) < NO_LENGTH or abs(first.gain - 1) <= LEAST_FACTOR or first.rest > first.limit(limits):
        return ""
    factor = f"{first.gain:.2f}" if abs(first.gain) >= SMALL_LENGTH else f"{first.gain:.3g}"
    return f"the gradient of {first.parameter} is multiplied by {factor} in the FP8 arm"
