"""Do the weights move, and does the reference learn? Without that a loss says nothing about FP8. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from pytest_fp8.codes import C
from pytest_fp8.questions.findings import fail, not_exercised, some
from pytest_fp8.questions.loss.evidence import Curve, LossEvidence
from pytest_fp8.stats.loss import loss_fall
from pytest_fp8.verdicts import Finding

MOVED = 0.10
"""Share of the weights with a gradient that a curve must move in the reference (docs/limits.md)."""
STILL, LESS = 0.01, 0.5
"""A weight of the FP8 arm stands still, or trains in part, where fewer of its elements moved than this share of what
the reference moved."""
RISES = 2.0
"""Of its first value, by which a loss may rise to its end without being said to diverge."""
ENOUGH = 100
"""Moved elements of the reference's sample from which such a share means something."""


def weights_stand_still(evidence: LossEvidence) -> Finding | None:
    """Weights that train in the reference and not in the FP8 arm."""
    return _moved_less(C.WEIGHTS_STAND_STILL, evidence, STILL, "weights do not train in the FP8 arm")


def weights_move_less(evidence: LossEvidence) -> Finding | None:
    """Weights of which a large part trains in the reference alone. A loss that ends higher says more than this."""
    return _moved_less(C.MOVE_LESS, evidence, LESS, "weights train only in part in the FP8 arm")


def _moved_less(code: C, evidence: LossEvidence, share: float, words: str) -> Finding | None:
    """Weights that move so little with every seed: an expert may rest with one."""
    seeds = sorted(evidence.fp8)
    first, mine = evidence.bf16[seeds[0]].movement, evidence.fp8[seeds[0]].movement
    still = [name for name in first if all(moved_ratio(name, evidence, s) < share for s in seeds)]
    if not still:
        return None
    name = still[0]
    return fail(
        code,
        f"{len(still)} of {len(first)} {words}",
        expected=f"weights that move as in BF16, where {first[name].moved:.1%} of {name} have moved at the end",
        seen=f"{mine[name].moved:.1%} in FP8: {some(still)}",
        cause="their gradients are zero or lost in the FP8 arm"
        if mine[name].reached < LESS * first[name].reached
        else "they have gradients, but the FP8 arm's optimizer does not change them: a learning rate of 0, an "
        "optimizer that steps other copies, a step that is skipped",
        next_step="after a step in each arm print weight.grad.norm() of these weights and the optimizer's learning "
        "rates",
    )


def moved_ratio(name: str, evidence: LossEvidence, seed: int) -> float:
    """What moved of a weight in the FP8 arm, over what moved in the reference; 1 where too little did there."""
    reference, mine = evidence.bf16[seed].movement[name], evidence.fp8[seed].movement.get(name)
    if mine is None or reference.moved < MOVED / 2 or reference.moved * reference.elements < ENOUGH:
        return 1.0
    return mine.moved / reference.moved


def least_moved(evidence: LossEvidence) -> float:
    """The lowest :func:`moved_ratio` of any weight and seed."""
    return min((moved_ratio(n, evidence, s) for s in evidence.bf16 for n in evidence.bf16[s].movement), default=1.0)


def nothing_learnt(evidence: LossEvidence) -> Finding | None:
    """The reference's weights hardly move, or its loss does not fall: equal losses then show nothing."""
    seeds = sorted(evidence.bf16)
    share, (_, reached) = moved_share(evidence.bf16), _sums(list(evidence.bf16.values()))
    if share is not None and share < MOVED:
        return _little_moves(share, reached, f"{share:.1%} after {len(evidence.bf16[seeds[0]].losses)} steps")
    curves = [evidence.bf16[s].losses for s in seeds]
    fall, begin, end = loss_fall(curves), *(fmean(losses[at] for losses in curves) for at in (0, -1))
    if fall.learns:
        return None
    if end > begin + RISES * abs(begin):
        return not_exercised(
            C.REFERENCE_RISES,
            "BF16's own loss rises, so that it says nothing about FP8",
            expected="a loss that falls by more than it changes from step to step",
            seen=f"{begin:.3g} at its first step, {end:.3g} at its last",
            cause="its training diverges, or does not lower this loss",
            next_step="a smaller learning rate, Workload(learning_rate=...), or one that warms up; or another loss",
        )
    return not_exercised(
        C.NOTHING_LEARNT,
        "BF16 learns nothing in these steps, so its loss says nothing about FP8",
        expected="a loss that falls by more than it changes from step to step",
        seen=f"it {'rises' if fall.amount < 0 else 'falls'} by {abs(fall.amount):.3g} +- {2 * fall.error:.2g} from the "
        "first fifth of the steps to the last",
        cause="too few steps, a learning rate too small or too large, data without anything to learn, or a loss "
        "that training does not lower (an adversarial one)",
        next_step="more steps, @pytest.mark.fp8(steps=...), another learning rate, or Workload(loss=...) that "
        "gives a loss which training lowers",
    )


def _little_moves(share: float, reached: float, seen: str) -> Finding:
    if not reached:
        code, seen = C.NO_GRADIENT, f"{seen}; no weight had a gradient other than 0 in any step"
        cause = "the loss does not depend on the weights: a detach(), a constant, or a factor of 0"
        then = "loss.backward() must reach the model's parameters: look at where the loss leaves its output"
    elif share:
        code = C.SMALL_STEPS
        cause = (
            "the learning rate is too small for bfloat16 weights: a step that changes a weight by less than about "
            "0.3 % is rounded away"
        )
        then = (
            "a larger learning rate for this test; in training, master weights in float32 or stochastic rounding. "
            "What each layer computes does not need a loss: assert_layers()"
        )
    else:
        code = C.NOTHING_MOVES
        cause = (
            "the optimizer moves no weight at all: a learning rate of 0, or one that does nothing to bfloat16 weights "
            "(seen: torch 2.13's SGD(fused=True) on a CPU)"
        )
        then = "take two steps by hand on a bfloat16 parameter with this optimizer"
    expected = f"at least {MOVED:.0%} of the weights with a gradient differ from their start at the end"
    headline = "too few weights move in BF16 for a loss to say anything about FP8"
    return not_exercised(code, headline, expected=expected, seen=seen, cause=cause, next_step=then)


def moved_share(curves: Mapping[int, Curve]) -> float | None:
    """Share of an arm's weights that moved, of those with a gradient, 0 where none has one; ``None`` where no weight is
    known."""
    moved, reached = _sums(list(curves.values()))
    if not any(curve.movement for curve in curves.values()):
        return None
    return moved / reached if reached else 0.0


def _sums(curves: Sequence[Curve]) -> tuple[float, float]:
    every = [one for curve in curves for one in curve.movement.values()]
    # A weight that decays moves without a gradient, too: it counts as reached where it moved.
    return sum(m.elements * m.moved for m in every), sum(m.elements * max(m.reached, m.moved) for m in every)
