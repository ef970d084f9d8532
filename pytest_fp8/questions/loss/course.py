"""Did both arms train alike, step after step? What a curve shows beside its losses, compared between the arms. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_fp8.codes import D
from pytest_fp8.questions.findings import fail, invalid, some
from pytest_fp8.questions.loss.evidence import Course, LossEvidence
from pytest_fp8.verdicts import Finding

RATES = 1e-6
"""Relative difference of two learning rates that is none: float32."""


def trained_otherwise(evidence: LossEvidence) -> Finding | None:
    """The first difference between the arms' courses that FP8 does not explain, with any seed.

    Not compared is what differs between BF16 and itself one rounding apart: a schedule that looks at the loss.
    """
    for seed in sorted(evidence.fp8):
        bf16, fp8 = evidence.bf16[seed].course, evidence.fp8[seed].course
        twin = evidence.twin[seed].course if seed in evidence.twin else bf16
        found = _stepped(bf16, fp8, twin) or _rates(bf16, fp8, twin) or _state(bf16, fp8) or _left(bf16, fp8)
        if found is not None:
            return found
    return _alone(evidence)


def _stepped(bf16: Course, fp8: Course, twin: Course) -> Finding | None:
    if list(bf16.stepped) == list(fp8.stepped) or list(bf16.stepped) != list(twin.stepped):
        return None
    step = next(i for i, (a, b) in enumerate(zip(bf16.stepped, fp8.stepped, strict=False)) if a != b)
    return invalid(
        D.OTHER_STEPS,
        "the arms' optimizers do not step equally often",
        expected=f"as many steps of the optimizer in both arms; {sum(bf16.stepped)} in BF16",
        seen=f"{sum(fp8.stepped)} in FP8; in training step {step} {bf16.stepped[step]} in BF16 and {fp8.stepped[step]} "
        "in FP8",
        cause="the step, a callback or a gradient scaler skips or repeats optimizer.step() in one arm alone",
        next_step="step the optimizer under the same condition in both arms; optimizer.state's step counts show a "
        "skipped step",
    )


def _rates(bf16: Course, fp8: Course, twin: Course) -> Finding | None:
    step = _first_other(bf16.rates, fp8.rates)
    # Rates that differ from the start are the ledger's, which knows whose they are.
    if not step or _first_other(bf16.rates, twin.rates) is not None:
        return None
    return invalid(
        D.OTHER_RATES,
        "the arms' learning rates go apart",
        expected=f"the same rates in both arms; after {step} training steps {rates_in_words(bf16.rates[step])} in BF16",
        seen=f"{rates_in_words(fp8.rates[step])} in FP8",
        cause="the schedule steps more often in one arm, or something sets the rate there alone",
        next_step="step the schedule at one place, once a training step; print optimizer.param_groups[0]['lr'] in both "
        "arms",
    )


def _first_other(one: Sequence[Sequence[float]], two: Sequence[Sequence[float]]) -> int | None:
    for index, (a, b) in enumerate(zip(one, two, strict=False)):
        if len(a) == len(b) and any(abs(x - y) > RATES * max(abs(x), abs(y)) for x, y in zip(a, b, strict=True)):
            return index
    return None


def rates_in_words(rates: Sequence[float]) -> str:
    return ", ".join(f"{rate:.6g}" for rate in dict.fromkeys(rates))


def _state(bf16: Course, fp8: Course) -> Finding | None:
    other = [name for name in bf16.state if name in fp8.state and bf16.state[name] != fp8.state[name]]
    if not other:
        return None
    return invalid(
        D.OTHER_OPTIMIZER_STATE,
        f"the arms' optimizers keep something else for {len(other)} weight(s)",
        expected=f"{other[0]}: {bf16.state[other[0]] or 'no tensor'}, as in BF16",
        seen=f"{fp8.state[other[0]] or 'no tensor'}; so for {some(other)}",
        cause="master weights or moments in another precision in one arm alone: it then keeps updates that the other "
        "rounds away, and the losses compare optimizers instead of FP8",
        next_step="give both arms the same optimizer state: the same dtypes, and master weights in both or in none",
    )


def _left(bf16: Course, fp8: Course) -> Finding | None:
    """Where one arm leaves none and the other some. A step may well leave all of them, and clear them at its start."""
    if bool(bf16.left) == bool(fp8.left):
        return None
    arm, names = ("FP8", fp8.left) if fp8.left else ("BF16", bf16.left)
    return invalid(
        D.GRADIENTS_LEFT,
        f"gradients are left over after the steps of the {arm} arm alone",
        expected="gradients that are cleared in both arms after a step, or in neither",
        seen=f"left in {arm}: {some(list(names))}",
        cause="zero_grad() does not reach these parameters: it is called on an optimizer or module that does not hold "
        "them, so that gradients of several steps add up",
        next_step="call model.zero_grad(), or optimizer.zero_grad() of the optimizer that holds all parameters, in "
        "both arms",
    )


def _alone(evidence: LossEvidence) -> Finding | None:
    """What the optimizer does not step and what moves with every seed in one arm and not so in the other: a teacher,
    running statistics."""
    if names := _moving(evidence, in_bf16=True):
        return fail(
            D.STANDS_STILL,
            f"{len(names)} tensor(s) that no optimizer steps stand still in the FP8 arm",
            expected=f"{names[0]} to change over a curve, as in BF16",
            seen=f"unchanged in FP8: {some(names)}",
            cause="a teacher, an average or running statistics that are updated by hand: the update holds the tensors "
            "of before the conversion, which put others in their place",
            next_step="look the tensors up by name at each update, after the conversion",
        )
    if names := _moving(evidence, in_bf16=False):
        return fail(
            D.FROZEN_MOVES,
            f"{len(names)} tensor(s) that no optimizer steps move in the FP8 arm alone",
            expected=f"{names[0]} to stay as it is over a curve, as in BF16",
            seen=f"changed in FP8: {some(names)}",
            cause="something in the FP8 arm writes into weights that are frozen",
            next_step=f"compare {names[0]} before and after each step of the FP8 arm, and look for what writes into it",
        )
    return None


def _moving(evidence: LossEvidence, in_bf16: bool) -> list[str]:
    """What moves, or does not, with every seed in BF16, and with some seed otherwise in FP8."""
    arms = [(evidence.bf16[s].course.alone, evidence.fp8[s].course.alone) for s in sorted(evidence.fp8)]
    return [
        name
        for name in arms[0][0]
        if all(b.get(name) is in_bf16 and name in f for b, f in arms) and any(f[name] is not in_bf16 for _, f in arms)
    ]
