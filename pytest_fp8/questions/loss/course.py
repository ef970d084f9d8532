"""Did both arms train alike, step after step? What a curve shows beside its losses, compared between the arms. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pytest_fp8.codes import D
from pytest_fp8.questions.findings import finding, some
from pytest_fp8.questions.loss.evidence import Course, LossEvidence
from pytest_fp8.verdicts import Finding, Verdict

RATES = 1e-6
"""Relative difference of two learning rates that is none: float32."""


def trained_otherwise(evidence: LossEvidence) -> Finding | None:
    """The first difference between the arms' courses that FP8 does not explain, with any seed.

    Not compared is what differs between BF16 and itself with noise of FP8's size: a schedule that looks at the loss.
    """
    for seed in sorted(evidence.fp8):
        bf16, fp8 = evidence.bf16[seed].course, evidence.fp8[seed].course
        if found := _other_course(bf16, fp8, evidence.noisy[seed].course if seed in evidence.noisy else bf16):
            code, expected, seen, given = found
            return finding(code, expected, seen, Verdict.INVALID, **given)
    # What the optimizer does not step and moves with every seed in one arm alone: a teacher, running statistics.
    for code, in_bf16, seen in ((D.STANDS_STILL, True, "unchanged"), (D.FROZEN_MOVES, False, "changed")):
        if names := _moving(evidence, in_bf16):
            does = "change over a curve" if in_bf16 else "stay as it is over a curve"
            expected, given = f"{names[0]} to {does}, as in BF16", {"count": len(names), "name": names[0]}
            return finding(code, expected, f"{seen} in FP8: {some(names)}", **given)
    return None


def _other_course(bf16: Course, fp8: Course, noisy: Course) -> tuple[D, str, str, dict[str, Any]] | None:
    """Code, expected, seen, and what the words leave open."""
    mine, theirs = list(fp8.stepped), list(bf16.stepped)
    if mine != theirs == list(noisy.stepped):
        step = next(i for i, (a, b) in enumerate(zip(theirs, mine, strict=False)) if a != b)
        seen = f"{sum(mine)} in FP8; in training step {step} {theirs[step]} in BF16 and {mine[step]} in FP8"
        return D.OTHER_STEPS, f"as many steps of the optimizer in both arms; {sum(theirs)} in BF16", seen, {}
    # Rates that differ from the start are the ledger's, which knows whose they are.
    if (at := _first_other(bf16.rates, fp8.rates)) and _first_other(bf16.rates, noisy.rates) is None:
        expected = f"the same rates in both arms; after {at} training steps {rates_in_words(bf16.rates[at])} in BF16"
        return D.OTHER_RATES, expected, f"{rates_in_words(fp8.rates[at])} in FP8", {}
    if other := [name for name in bf16.state if name in fp8.state and bf16.state[name] != fp8.state[name]]:
        reference, seen = (arm.state[other[0]] or "no tensor" for arm in (bf16, fp8))
        expected, seen = f"{other[0]}: {reference}, as in BF16", f"{seen}; so for {some(other)}"
        return D.OTHER_OPTIMIZER_STATE, expected, seen, {"count": len(other)}
    # A step may well leave all gradients, and clear them at its start.
    if bool(bf16.left) != bool(fp8.left):
        arm, names = ("FP8", fp8.left) if fp8.left else ("BF16", bf16.left)
        expected = "gradients that are cleared in both arms after a step, or in neither"
        return D.GRADIENTS_LEFT, expected, f"left in {arm}: {some(list(names))}", {"arm": arm}
    return None


def _first_other(one: Sequence[Sequence[float]], two: Sequence[Sequence[float]]) -> int | None:
    for index, (a, b) in enumerate(zip(one, two, strict=False)):
        if len(a) == len(b) and any(abs(x - y) > RATES * max(abs(x), abs(y)) for x, y in zip(a, b, strict=True)):
            return index
    return None


def rates_in_words(rates: Sequence[float]) -> str:
    return ", ".join(f"{rate:.6g}" for rate in dict.fromkeys(rates))


def _moving(evidence: LossEvidence, in_bf16: bool) -> list[str]:
    """What moves, or does not, with every seed in BF16, and with some seed otherwise in FP8."""
    arms = [(evidence.bf16[s].course.alone, evidence.fp8[s].course.alone) for s in sorted(evidence.fp8)]
    return [
        name
        for name in arms[0][0]
        if all(b.get(name) is in_bf16 and name in f for b, f in arms) and any(f[name] is not in_bf16 for _, f in arms)
    ]
