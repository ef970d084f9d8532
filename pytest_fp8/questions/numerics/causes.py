"""Why gradients are wrong: what the evidence of the same step says of it, most telling first. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pytest_fp8.codes import Code, D, N
from pytest_fp8.floats import of_text
from pytest_fp8.questions.findings import fail, some
from pytest_fp8.questions.numerics.evidence import NumericsEvidence
from pytest_fp8.questions.numerics.gradients import Difference
from pytest_fp8.questions.numerics.limits import Limits
from pytest_fp8.verdicts import Finding

NO_LENGTH, SMALL_LENGTH = 0.02, 0.2
"""Of a gradient over BF16's, where nothing arrives; and where what arrives is a small part of the loss."""
LEAST_FACTOR = 0.1
"""A gain that is nearer to 1 explains no difference that fails."""
OTHER_OUTPUT, TIMES_BEFORE = 0.2, 4.0
"""Least relative difference of a module's output between the arms that is called another output, and over the largest
difference of any module before it. A sound FP8 layer's is 0.03 to 0.05. It chooses words alone."""
MANY_LOST = 0.2
"""Share of an operand's values that the recipe's own casts make 0, from which that is the cause."""
MORE_ZEROS = 0.01
"""Share of a gradient's values that are 0 in FP8 and not in BF16, which is told."""


def cause_of(
    evidence: NumericsEvidence, found: Sequence[Difference], limits: Limits, wrong: Sequence[Difference]
) -> Finding:
    """The cause of the wrong gradients among those found; both in the order of the backward pass."""
    first = wrong[0]
    name = first.parameter
    if not math.isfinite(first.relative):
        return _because(N.GRADIENT_NOT_FINITE, f"the gradient of {name} is not finite in the FP8 arm")
    return (
        _random(evidence)
        or _forward(evidence)
        or _biases(wrong, limits)
        or _factor(first, limits)
        or _outlier(evidence)
        or _length(first)
        or _stored(found, wrong, evidence)
        or _because(
            N.OTHER_GRADIENT,
            f"the backward pass of the FP8 arm computes something else from {name} on: a part of the tokens or values "
            "is lost, or operands are wrong",
        )
    )


def _because(code: Code, cause: str, next_step: str = "") -> Finding:
    return fail(code, "", cause=cause, next_step=next_step)


def _random(evidence: NumericsEvidence) -> Finding | None:
    mine, theirs = evidence.fp8.gradients.random, evidence.bf16.gradients.random
    if mine == theirs:
        return None
    return _because(
        D.OTHER_RANDOM_NUMBERS,
        "the arms draw other random numbers in this step, so that these are gradients of other dropout masks or other "
        "noise: a generator is seeded again inside the step, or recomputation does not restore it",
        "ask fp8_pair.assert_layers(), which names the first operator that draws others",
    )


def _forward(evidence: NumericsEvidence) -> Finding | None:
    """The first module whose output already differs by much more than that of any module before it."""
    import numpy as np

    before = 0.0
    mine = evidence.fp8.outputs
    for name, text in evidence.bf16.outputs.items():
        ours, theirs = (np.asarray(of_text(t)) for t in (text, mine.get(name, "")))
        length = float(np.linalg.norm(ours))
        if ours.shape != theirs.shape or not length or not np.isfinite(theirs).all():
            continue
        apart = float(np.linalg.norm(theirs - ours)) / length
        if apart > max(OTHER_OUTPUT, TIMES_BEFORE * before):
            return _because(
                N.FORWARD_DIFFERS,
                f"the forward pass differs already: {name or 'the model'} gives an output that is {apart:.0%} off "
                f"BF16's, and no module before it is more than {before:.0%} off: it computes something else in the "
                "FP8 arm",
                f"compare what {name or 'the model'} gives in both arms for the same input",
            )
        before = max(before, apart)
    return None


def _biases(wrong: Sequence[Difference], limits: Limits) -> Finding | None:
    """Only biases are wrong: what the backward pass hands on and multiplies is right."""
    first = wrong[0]
    if not all(d.parameter.rpartition(".")[2] == "bias" for d in wrong):
        return None
    what = (
        f"no gradient arrives at {first.parameter} in the FP8 arm: its layer leaves it out of its output, or detaches "
        "it"
        if first.length < NO_LENGTH
        else f"{_times(first, limits) or f'another sum arrives at {first.parameter} in the FP8 arm'}: a sum over the "
        "rows that is a mean, misses rows, or is kept too coarsely"
    )
    names = some([d.parameter for d in wrong])
    return _because(N.BIAS_GRADIENT, f"only gradients of biases are wrong ({names}): {what}")


def _factor(first: Difference, limits: Limits) -> Finding | None:
    times = _times(first, limits)
    return _because(N.GRADIENT_TIMES, times) if times else None


def _times(first: Difference, limits: Limits) -> str:
    if abs(first.gain) < NO_LENGTH or abs(first.gain - 1) <= LEAST_FACTOR or first.rest > first.limit(limits):
        return ""
    factor = f"{first.gain:.2f}" if abs(first.gain) >= SMALL_LENGTH else f"{first.gain:.3g}"
    return f"the gradient of {first.parameter} is multiplied by {factor} in the FP8 arm"


def _outlier(evidence: NumericsEvidence) -> Finding | None:
    worst = max(evidence.fp8.products, key=lambda product: product.underflow, default=None)
    if worst is None or worst.underflow < MANY_LOST:
        return None
    return _because(
        N.OUTLIER,
        f"the recipe's own casts make {worst.underflow:.0%} of an operand's values 0 in {worst.role} of {worst.layer}: "
        "far larger values set the scale, as padding does that holds large numbers. The layers multiply as promised",
        "set pad rows to 0, or take a recipe that scales each row by itself, recipe='rowwise'",
    )


def _length(first: Difference) -> Finding | None:
    if first.length >= SMALL_LENGTH:
        return None
    almost = f"almost no gradient arrives at {first.parameter} in the FP8 arm: {first.length:.2g} times BF16's length"
    nothing = f"no gradient arrives at {first.parameter} in the FP8 arm"
    return _because(N.GRADIENT_MISSING, nothing if first.length < NO_LENGTH else almost)


def _stored(found: Sequence[Difference], wrong: Sequence[Difference], evidence: NumericsEvidence) -> Finding | None:
    """Only weights of FP8 layers are wrong, and what the backward pass hands on is right."""
    weights = {f"{product.layer}.weight" for product in evidence.fp8.products}
    names = [d.parameter for d in wrong]
    after = found[found.index(wrong[0]) + 1 :]
    if not weights.issuperset(names) or all(d.parameter in names for d in after):
        return None
    mine, theirs = (arm.gradients.zeros.get(names[0], 0.0) for arm in (evidence.fp8, evidence.bf16))
    zeros = (
        f"; {mine:.0%} of the values of {names[0]}'s are 0, {theirs:.0%} in BF16" if mine - theirs > MORE_ZEROS else ""
    )
    return _because(
        N.GRADIENT_STORED,
        f"only gradients of FP8 layers' weights are wrong ({some(names)}), and what the backward pass hands on is "
        f"right: the weight gradient is stored, summed or rounded too coarsely after its product{zeros}",
    )
