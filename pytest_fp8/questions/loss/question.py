"""Asks for loss curves, seed by seed, until they decide."""

from __future__ import annotations

from collections.abc import Callable

from pytest_fp8.case import Case
from pytest_fp8.plan import FP8, REFERENCE, Ask, Asking, TwoArms
from pytest_fp8.questions.loss.evidence import Curve, LossEvidence, largest_number
from pytest_fp8.questions.loss.first_step import wants_rounding, with_rounding
from pytest_fp8.questions.loss.restart import with_doubt
from pytest_fp8.stats.loss import MAX_LOSS_SEEDS, LossGap
from pytest_fp8.verdicts import Verdict

Judge = Callable[[LossEvidence], LossGap]


def loss_of(arms: TwoArms, twin: bool, nats: bool, judge: Judge) -> Asking[LossEvidence]:
    """Curves that decide: first of the case's own number of seeds, then with one seed more at each look while the
    verdict is INCONCLUSIVE.

    It ends at the largest number of seeds, and at the first that no further one can mend: with other data in an arm, or
    with numbers that are not finite. ``twin``: whether twins are wanted too. The FP8 arm's come at the second look:
    they can only widen the margin, and a step in FP8 takes three times as long on a CPU. ``nats``: whether the loss is
    a cross-entropy. Where all seeds give one curve, both arms of all but the first start with their weights one
    rounding away, another one for each seed, and the twin of these is the first seed's curve.
    """
    case = arms.case
    fp8: dict[int, Curve] = {}
    bf16: dict[int, Curve] = {}
    twins: dict[int, Curve] = {}
    fp8_twins: dict[int, Curve] = {}
    one, rounding = False, False

    def look(last: bool, unfinished: bool = False) -> Asking[tuple[LossEvidence, bool]]:
        """The evidence so far, and whether it decides."""
        nonlocal rounding
        found = LossEvidence(
            dict(fp8), dict(bf16), dict(twins), dict(fp8_twins), unfinished=unfinished, nats=nats, one_curve=one
        )
        rounding = rounding or wants_rounding(judge(found), last and not unfinished)
        if rounding:
            found = yield from with_rounding(case, found)
        return found, with_doubt(judge(found), found).verdict is not Verdict.INCONCLUSIVE

    if arms.takes_turns:
        yield from _reference_first(case, twin)
    for seed in range(max(case.seeds, MAX_LOSS_SEEDS)):
        if seed:
            one = yield from _one_curve(case)
        # While the FP8 arm trains, the reference is done with all of its own that is wanted soon.
        again = [_curve(case, REFERENCE, 0) if one else _curve(case, REFERENCE, seed, moved=True)] if twin else []
        soon = [_curve(case, REFERENCE, 1)] if seed == 0 and case.seeds > 1 else []
        # Each keeps all its threads: the sums of a convolution depend on their number, and the time does not.
        own = _curve(case, FP8, seed, one, watch=True)
        fp8[seed], bf16[seed], *more = yield own, _curve(case, REFERENCE, seed, one), *again, *soon
        new = [fp8[seed], bf16[seed], *more[: len(again)]]
        if twin:
            twins[seed] = new[-1]
        # The twin of a moved run is the first seed's, which may have other batches.
        alike = {curve.data for curve in (new[:2] if one else new)}
        if len(alike) > 1 or not all(curve.finite for curve in new):
            found, _ = yield from look(last=seed + 1 >= largest_number(one))
            return found
        if seed + 1 < case.seeds:
            continue
        last = seed + 1 >= largest_number(one)
        if twin and not fp8_twins and (last or seed + 1 >= case.seeds + 1):
            found, decided = yield from look(last, unfinished=True)
            if decided:
                return found
            for each in range(case.seeds):
                fp8_twins[each] = fp8[0] if one and each else (yield _curve(case, FP8, each, moved=True))
        found, decided = yield from look(last, unfinished=twin and not fp8_twins)
        if decided or last or not all(curve.finite for curve in fp8_twins.values()):
            break
    return found


def _curve(case: Case, arm: str, seed: int, moved: bool = False, **more: bool) -> Ask:
    """``moved``: from weights one rounding away."""
    return Ask(arm, "curve", Curve, seed=seed, steps=case.steps, jitter=moved, **more)


def _one_curve(case: Case) -> Asking[bool]:
    """Whether the reference's first two seeds give one curve, number by number: weights that are loaded or seeded by
    ``build()``, and batches that depend on their step alone."""
    first, second = yield _curve(case, REFERENCE, 0), _curve(case, REFERENCE, 1)
    return bool(first.losses == second.losses)


def _reference_first(case: Case, twin: bool) -> Asking[None]:
    """Have all that the first look asks of the reference: it is asked before the FP8 arm is built."""
    one = case.seeds > 1 and (yield from _one_curve(case))
    moved = [(seed, one and seed > 0) for seed in range(case.seeds)]
    again = [(seed, True) for seed in range(case.seeds)] if twin else []
    yield tuple(_curve(case, REFERENCE, *each) for each in [*moved, *again])
