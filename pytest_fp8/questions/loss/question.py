"""Asks for loss curves, seed by seed, until they decide; and for the yardstick where they need it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pytest_fp8.case import Case
from pytest_fp8.plan import FP8, REFERENCE, Ask, Asking, TwoArms
from pytest_fp8.questions.loss.alike import start_apart, trained_otherwise
from pytest_fp8.questions.loss.check import judge_gap
from pytest_fp8.questions.loss.evidence import START, Curve, LossEvidence, largest_number
from pytest_fp8.stats.loss import MAX_LOSS_SEEDS
from pytest_fp8.verdicts import Verdict

DRAWS = 4
"""Ways in which noise moves a start. One can leave a loss where it is by chance."""


def loss_of(arms: TwoArms, nats: bool, steps: int = 0) -> Asking[LossEvidence]:
    """Curves that decide: first of the case's own number of seeds, then with one seed more at each look while the
    verdict is INCONCLUSIVE.

    It ends at the largest number of seeds, and at the first that no further one can mend: with other data in an arm, or
    with numbers that are not finite. ``nats``: whether the loss is a cross-entropy. ``steps``: of each curve; 0:
    the case's own. Where all seeds give one curve, both arms of all but the first start with their weights one rounding
    away, another one for each seed.
    """
    case = replace(arms.case, steps=steps or arms.case.steps)
    fp8: dict[int, Curve] = {}
    bf16: dict[int, Curve] = {}
    one = False
    if arms.takes_turns:
        yield from _reference_first(case)
    for seed in range(max(case.seeds, MAX_LOSS_SEEDS)):
        if seed:
            one = yield from _one_curve(case)
        # While the FP8 arm trains, the reference is done with all of its own that is wanted soon.
        soon = [_curve(case, REFERENCE, 1)] if seed == 0 and case.seeds > 1 else []
        # Each keeps all its threads: the sums of a convolution depend on their number, and the time does not.
        own = _curve(case, FP8, seed, one, watch=True)
        fp8[seed], bf16[seed], *_ = yield own, _curve(case, REFERENCE, seed, one), *soon
        found = LossEvidence(dict(fp8), dict(bf16), nats=nats, one_curve=one)
        if not (fp8[seed].finite and bf16[seed].finite):
            return found
        if fp8[seed].data != bf16[seed].data:
            break
        if seed + 1 < case.seeds:
            continue
        found = yield from _with_noise(case, found)
        if judge_gap(found).verdict is not Verdict.INCONCLUSIVE or seed + 1 >= largest_number(one):
            break
    return (yield from _with_starts(case, found))


def _with_noise(case: Case, found: LossEvidence) -> Asking[LossEvidence]:
    """The evidence with the reference's noisy curves where a gap does not pass without, or where the arms trained
    otherwise: a schedule that looks at the loss may do so with any noise."""
    if judge_gap(found).verdict is Verdict.PASS and not trained_otherwise(found):
        return found
    seeds = sorted(found.bf16)
    curves = yield tuple(_curve(case, REFERENCE, s, found.one_curve and s > 0, noise=0) for s in seeds)
    return replace(found, noisy=dict(zip(seeds, curves, strict=True)))


def _with_starts(case: Case, found: LossEvidence) -> Asking[LossEvidence]:
    """The evidence with the reference's first steps again; and with noise where these lie apart. Most models' do not,
    and their reference is not asked."""
    again = yield _again(case)
    starts: tuple[Curve, ...] = ()
    if start_apart(found.bf16[0], again):
        steps = min(START, case.steps)
        starts = yield tuple(_curve(case, REFERENCE, 0, steps=steps, noise=1 + draw) for draw in range(DRAWS))
    return replace(found, again=again, noisy_starts=[start.losses for start in starts])


def _curve(case: Case, arm: str, seed: int, moved: bool = False, steps: int = 0, **more: Any) -> Ask:
    """``moved``: from weights one rounding away; ``noise``: the number of a draw."""
    return Ask(arm, "curve", Curve, seed=seed, steps=steps or case.steps, jitter=moved, **more)


def _again(case: Case) -> Ask:
    """The start of the reference's first curve. Asked in other words than the curve, or a short one's answer would be
    given again."""
    return Ask(REFERENCE, "curve", Curve, seed=0, steps=min(START, case.steps))


def _one_curve(case: Case) -> Asking[bool]:
    """Whether the reference's first two seeds give one curve, number by number: weights that are loaded or seeded by
    ``build()``, and batches that depend on their step alone."""
    first, second = yield _curve(case, REFERENCE, 0), _curve(case, REFERENCE, 1)
    return bool(first.losses == second.losses)


def _reference_first(case: Case) -> Asking[None]:
    """Have all that the first look asks of the reference: it is asked before the FP8 arm is built."""
    one = case.seeds > 1 and (yield from _one_curve(case))
    yield tuple(_curve(case, REFERENCE, seed, one and seed > 0) for seed in range(case.seeds))
    yield _again(case)
