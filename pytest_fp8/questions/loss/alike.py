"""Do both arms train alike, from the first step to the last; and does the reference begin each curve anew? Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from pytest_fp8.codes import C, D
from pytest_fp8.questions.findings import finding, some
from pytest_fp8.questions.loss.evidence import Course, Curve, LossEvidence
from pytest_fp8.stats.loss import root_mean_square
from pytest_fp8.verdicts import Finding, Verdict

RATES = 1e-6
"""Relative difference of two learning rates that is none: float32."""
OTHER_RATE = 0.01
"""The same of two that a schedule makes. A rate that is derived from the weights differs by their rounding, 2**-8 and
less."""
ANOTHER_START = 2.0
"""Losses of a start that is trained again: another one from so many times what noise does to that start."""


# -- the whole course -------------------------------------------------------------------------------------------------


def trained_otherwise(evidence: LossEvidence) -> Finding | None:
    """The first difference between the arms' courses that FP8 does not explain, with any seed.

    Not compared is what differs between BF16 and itself with noise of FP8's size: a schedule that looks at the loss.
    """
    for seed in sorted(evidence.fp8):
        bf16, fp8 = evidence.bf16[seed].course, evidence.fp8[seed].course
        if found := _other_course(bf16, fp8, evidence.noisy[seed].course if seed in evidence.noisy else bf16):
            return found
    # What the optimizer does not step and moves with every seed in one arm alone: a teacher, running statistics.
    for code, in_bf16, seen in ((D.STANDS_STILL, True, "unchanged"), (D.FROZEN_MOVES, False, "changed")):
        if names := _moving(evidence, in_bf16):
            does = "change over a curve" if in_bf16 else "stay as it is over a curve"
            expected = f"{names[0]} to {does}, as in BF16"
            return finding(code, expected, f"{seen} in FP8: {some(names)}", count=len(names))
    return None


def _other_course(bf16: Course, fp8: Course, noisy: Course) -> Finding | None:
    mine, theirs = list(fp8.stepped), list(bf16.stepped)
    if mine != theirs == list(noisy.stepped):
        step = next(i for i, (a, b) in enumerate(zip(theirs, mine, strict=False)) if a != b)
        expected = f"as many steps of the optimizer in both arms; {sum(theirs)} in BF16"
        seen = f"{sum(mine)} in FP8; in training step {step} {theirs[step]} in BF16 and {mine[step]} in FP8"
        return finding(D.OTHER_STEPS, expected, seen, Verdict.INVALID)
    # Rates that differ from the start are the ledger's, which knows whose they are.
    if (at := _other_rates(bf16, fp8, RATES)) and _other_rates(bf16, noisy, RATES) is None:
        expected = f"the same rates in both arms; after {at} training steps {_in_words(bf16.rates[at])} in BF16"
        return finding(D.OTHER_RATES, expected, f"{_in_words(fp8.rates[at])} in FP8", Verdict.INVALID)
    if other := [name for name in bf16.state if name in fp8.state and bf16.state[name] != fp8.state[name]]:
        reference, seen = (arm.state[other[0]] or "no tensor" for arm in (bf16, fp8))
        expected, seen = f"{other[0]}: {reference}, as in BF16", f"{seen}; so for {some(other)}"
        return finding(D.OTHER_OPTIMIZER_STATE, expected, seen, Verdict.INVALID, count=len(other))
    # A step may well leave all gradients, and clear them at its start.
    if bool(bf16.left) != bool(fp8.left):
        arm, names = ("FP8", fp8.left) if fp8.left else ("BF16", bf16.left)
        expected = "gradients that are cleared in both arms after a step, or in neither"
        return finding(D.GRADIENTS_LEFT, expected, f"left in {arm}: {some(list(names))}", Verdict.INVALID, arm=arm)
    return None


def _other_rates(one: Course, two: Course, by: float) -> int | None:
    """Index of the first learning rates that differ by more than this share."""
    for index, (a, b) in enumerate(zip(one.rates, two.rates, strict=False)):
        if len(a) == len(b) and any(abs(x - y) > by * max(abs(x), abs(y)) for x, y in zip(a, b, strict=True)):
            return index
    return None


def _in_words(rates: Sequence[float]) -> str:
    return ", ".join(f"{rate:.6g}" for rate in dict.fromkeys(rates))


def _moving(evidence: LossEvidence, in_bf16: bool) -> list[str]:
    """What moves, or does not, with every seed in BF16, and with some seed otherwise in FP8."""
    arms = [(evidence.bf16[s].course.alone, evidence.fp8[s].course.alone) for s in sorted(evidence.fp8)]
    return [
        name
        for name in arms[0][0]
        if all(b.get(name) is in_bf16 and name in f for b, f in arms) and any(f[name] is not in_bf16 for _, f in arms)
    ]


# -- the start of a curve, trained again ------------------------------------------------------------------------------


def start_apart(first: Curve, again: Curve) -> float:
    """The largest difference of a loss of the first curve's start to that of the same step, trained again."""
    return max((abs(two - one) for one, two in zip(first.losses, again.losses, strict=False)), default=0.0)


def does_not_restart(evidence: LossEvidence) -> Finding | None:
    """The first steps of the reference's first curve against the same steps, trained again after all curves: other
    data, other learning rates at the start, or losses further apart than noise of FP8's size takes them."""
    again, first = evidence.again, evidence.bf16[min(evidence.bf16)]
    if again is None:
        return None
    # From one draw to the next: an arm that keeps something from curve to curve trains none of these as it trained the
    # first one, and each a little further than the one before.
    draws = [two - one for pair in pairwise(evidence.noisy_starts) for one, two in zip(*pair, strict=True)]
    apart, limit = start_apart(first, again), ANOTHER_START * root_mean_square(draws) / math.sqrt(2)
    if first.data_at_start != again.data_at_start:
        what, told = "batches", [f"checksum {curve.data_at_start:08x}" for curve in (first, again)]
    elif _other_rates(first.course, again.course, OTHER_RATE) == 0:
        what, told = "rates", [_in_words(curve.course.rates[0]) for curve in (first, again)]
    elif apart > limit:
        what = f"losses within {limit:.2g}"
        told = [", ".join(f"{x:.5g}" for x in curve.losses[: len(again.losses)]) for curve in (first, again)]
        told[1] += f": up to {apart:.2g} apart"
    else:
        return None
    expected = f"the {what} of the first steps of seed {first.seed} again: {told[0]}"
    return finding(C.NOT_ANEW, expected, f"{told[1]}, when these were trained again", Verdict.INVALID)
