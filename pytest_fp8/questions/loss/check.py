"""Is the loss still right? Whole curves of both arms over several seeds: asked for until they decide, and judged
together. All but :func:`loss_of` and what it calls is pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from pytest_fp8.case import Case
from pytest_fp8.codes import C, D
from pytest_fp8.plan import FP8, REFERENCE, Ask, Asking, TwoArms
from pytest_fp8.questions.findings import finding, some
from pytest_fp8.questions.loss.evidence import (
    START,
    Course,
    Curve,
    Look,
    LossEvidence,
    ProductCount,
    largest_number,
)
from pytest_fp8.stats.loss import (
    MAX_LOSS_SEEDS,
    OF_NOISE,
    LossGap,
    compare_curves,
    loss_fall,
    root_mean_square,
    tail_gap,
)
from pytest_fp8.verdicts import Decision, Figures, Finding, Verdict, passed

QUESTION = "loss"
MOVED = 0.10
"""Share of the weights with a gradient that a curve must move in the reference (docs/limits.md)."""
STILL = 0.01
"""A weight of the FP8 arm stands still where fewer of its elements moved than this share of what the reference
moved."""
ENOUGH = 100
"""Moved elements of the reference's sample from which such a share means something."""
TOO_EXACT = 0.01
"""Of the squared error of FP8 at its finest. Products of BF16 operands have a 300th of it, sound ones 0.37 and more."""
SOUND, WRONG = 0.01, 0.05
"""A layer whose products are off by at most SOUND on the median, as a share of their power, is judged: it multiplies
and does nothing besides. One product of it is wrong beyond WRONG."""
COARSE = 4.0
"""Nor is one that FP8 itself explains, as where training diverges: off by so many times what a scale for each whole
operand gives."""
RATES = 1e-6
"""Relative difference of two learning rates that is none: float32."""
OTHER_RATE = 0.01
"""The same of two that a schedule makes. A rate that is derived from the weights differs by their rounding, 2**-8 and
less."""
ANOTHER_START = 2.0
"""Losses of a start that is trained again: another one from so many times what noise does to that start."""
DRAWS = 4
"""Ways in which noise moves a start. One can leave a loss where it is by chance."""
CALLS = "calls of FP8 layers"
Counts = Iterator[tuple[str, dict[int, ProductCount]]]
"""What is counted, and by step."""


@dataclass(frozen=True)
class LossFigures(Figures):
    """Losses in nats, or in the unit of the user's own loss; gaps by seed, or by run of one curve, which is one of
    ``seeds``; ``moved``: share of the reference's weights with a gradient; ``margin``: the least one where the gap was
    not judged."""

    gaps: Sequence[float]
    seeds: int
    steps: int
    moved: float | None
    margin: float | None = None
    gap: float | None = None
    bound: float | None = None


def check_loss(evidence: LossEvidence) -> Decision:
    """Hard rules first (finite, curves that begin anew, same data, not constant, trained alike, not
    bit-equal, FP8 to the end), then the gap. Where that does not fail, the reference must have learnt something."""
    figures = figures_of(evidence)
    for rule in (
        *(not_finite, does_not_restart, _other_data, constant, trained_otherwise, weights_stand_still),
        *(curves_equal, fp8_lost_on_the_way, rare_products),
    ):
        if broken := rule(evidence):
            return broken.answer(QUESTION, figures)
    gap = judge_gap(evidence)
    found = explain_gap(gap, evidence)
    if gap.verdict is not Verdict.FAIL and not gap.below:
        found = nothing_learnt(evidence) or found
    return found.answer(QUESTION, replace(figures, margin=gap.margin, gap=gap.gap, bound=gap.bound))


def figures_of(evidence: LossEvidence) -> LossFigures:
    """Without those of a gap that was judged."""
    seeds = sorted(evidence.fp8)
    return LossFigures(
        gaps=[tail_gap(evidence.fp8[s].losses, evidence.bf16[s].losses) for s in seeds],
        seeds=1 if evidence.one_curve else len(seeds),
        steps=len(evidence.fp8[seeds[0]].losses),
        moved=_moved_share(evidence.bf16),
        margin=evidence.least,
    )


# -- each curve by itself ---------------------------------------------------------------------------------------------


def not_finite(evidence: LossEvidence) -> Finding | None:
    """The first loss or gradient norm that is not finite, of any seed."""
    for seed in sorted(evidence.fp8):
        for name, curve in (("BF16", evidence.bf16[seed]), ("FP8", evidence.fp8[seed])):
            for step, pair in enumerate(zip(curve.losses, curve.gradient_norms, strict=True)):
                if all(map(math.isfinite, pair)):
                    continue
                what, value = ("gradient norm", pair[1]) if math.isfinite(pair[0]) else ("loss", pair[0])
                before = f"; the loss was {curve.losses[step - 1]:.4f} the step before" if step else ""
                seen = f"{what} = {value} at step {step}, seed {seed}{before}"
                given: dict[str, Any] = {"what": what, "when": f" from step {step} on"}
                expected = f"finite numbers in all {len(curve.losses)} steps"
                if name == "BF16":
                    return finding(C.REFERENCE_NOT_FINITE, expected, seen, Verdict.INVALID, **given)
                expected += f" (BF16: {evidence.bf16[seed].losses[step]:.4f})"
                return finding(C.NOT_FINITE, expected, seen, **given)
    return None


def _other_data(evidence: LossEvidence) -> Finding | None:
    other = [s for s in sorted(evidence.fp8) if evidence.fp8[s].data != evidence.bf16[s].data]
    if not other:
        return None
    seed = other[0]
    seen = f"checksums {evidence.bf16[seed].data:08x} (BF16) and {evidence.fp8[seed].data:08x} (FP8), seed {seed}"
    return finding(D.OTHER_DATA, "the same batch in each step of both arms", seen)


def constant(evidence: LossEvidence) -> Finding | None:
    """The reference's loss is 0 throughout, or one number in every step of both arms. FP8 that is off gives the same,
    so it explains nothing."""
    for seed in sorted(evidence.fp8):
        fp8, bf16 = evidence.fp8[seed].losses, evidence.bf16[seed].losses
        if not any(bf16) or (len(bf16) > 1 and len({*fp8, *bf16}) == 1):
            # -0.0 is 0.
            seen = f"{bf16[0] + 0.0:.4g} in all {len(bf16)} steps of BF16, seed {seed}"
            return finding(C.CONSTANT, "a loss that moves as the weights do", seen, Verdict.INVALID)
    return None


def curves_equal(evidence: LossEvidence) -> Finding | None:
    """Losses and gradient norms of every seed. A loss near 60 has one bfloat16 in 0.25, so that the losses of one seed
    can be equal in sound FP8; norms are float32."""
    for s in evidence.fp8:
        mine, reference = evidence.fp8[s], evidence.bf16[s]
        if list(mine.losses) != list(reference.losses) or list(mine.gradient_norms) != list(reference.gradient_norms):
            return None
    expected = "losses and gradient norms that differ by rounding"
    return finding(C.BIT_EQUAL, expected, f"both equal in every step of {len(evidence.fp8)} seeds")


# -- FP8 in every step ------------------------------------------------------------------------------------------------


def fp8_lost_on_the_way(evidence: LossEvidence) -> Finding | None:
    """FP8 that ran in one step of a curve and not, or less, in another."""
    return _lost(evidence, _calls) or _too_exact(evidence) or _lost(evidence, _products)


def _calls(curve: Curve, evidence: LossEvidence) -> Counts:
    """Of the forward pass, in each step."""
    counts = zip(curve.calls.fp8, curve.calls.other, strict=True)
    yield CALLS, {step: ProductCount(*count) for step, count in enumerate(counts)}


def _products(curve: Curve, evidence: LossEvidence) -> Counts:
    """Of the first step of all curves, and of this one's last."""
    first = evidence.fp8[min(evidence.fp8)].first_products
    for phase, before in first.items() if curve.last_products else ():
        last = curve.last_products.get(phase, ProductCount(fp8=0, other=0))
        yield f"products of the {phase} pass", {0: before, len(curve.losses) - 1: last}


def _lost(evidence: LossEvidence, counted: Callable[[Curve, LossEvidence], Counts]) -> Finding | None:
    """An expert that rests takes its calls and products with it: fewer in FP8 alone are no finding, others must be
    more, or no product of that part of the step may be left in FP8."""
    for seed, curve in sorted(evidence.fp8.items()):
        for what, counts in counted(curve, evidence):
            best = max(counts, key=lambda step: (counts[step].fp8, -counts[step].other), default=0)
            fewer = [step for step, count in counts.items() if count.fp8 < counts[best].fp8]
            none = {step for step in fewer if what != CALLS and not counts[step].fp8}
            if lost := [step for step in fewer if step in none or counts[step].other > counts[best].other]:
                now, most, step = counts[lost[0]], counts[best], lost[0]
                expected = f"{most.fp8} {what} in FP8 and {most.other} others, as in step {best}"
                seen = f"{now.fp8} in FP8 and {now.other} others in step {step}, seed {seed}; fewer in FP8 "
                seen += f"in {len(lost)} of {len(curve.losses)} steps: {some([str(each) for each in lost])}"
                return finding(C.FP8_LOST, expected, seen, step=step, best=best)
    return None


def _too_exact(evidence: LossEvidence) -> Finding | None:
    """An FP8 layer's product of one step that is nearer to the exact one than FP8 can be: its casts were left out. The
    function that multiplies in FP8 does not show it, since libraries run the same one with casts switched off."""
    looks = list(_looks(evidence))
    found = [(look.of_finest, layer, seed, look.step) for layer, seed, look in looks if look.of_finest < TOO_EXACT]
    if not found:
        return None
    share, layer, seed, step = min(found)
    seen = f"{share:.1%} of that error in step {step}, seed {seed}; {len(found)} of {len(looks)} products that were "
    seen += f"looked at: {some({name for _, name, *_ in found})}"
    expected = f"products of {layer} off by as much as FP8 with a scale for each row and column gives"
    return finding(C.TOO_EXACT, expected, seen, about=layer)


def rare_products(evidence: LossEvidence) -> Finding | None:
    """FAIL where a layer's product was wrong in some steps of a curve and right in most."""
    looks = list(_looks(evidence))
    usual = {name: median([look.error for layer, _, look in looks if layer == name]) for name, *_ in looks}
    # A number that is not one is wrong.
    found = [
        (layer, seed, look)
        for layer, seed, look in looks
        if usual[layer] <= SOUND and not (look.error <= WRONG or look.of_coarsest <= COARSE)
    ]
    if not found:
        return None
    layer, seed, look = max(found, key=lambda one: one[2].error if math.isfinite(one[2].error) else math.inf)
    expected = f"x . W^T of {layer} off by about {usual[layer]:.1%} of its power, as in most steps"
    seen = f"{look.error:.1%} in step {look.step}, seed {seed}; {len(found)} of {len(looks)} products that were looked "
    seen += f"at: {some({name for name, *_ in found})}"
    return finding(C.RARE_PRODUCT, expected, seen, about=layer)


def _looks(evidence: LossEvidence) -> Iterator[tuple[str, int, Look]]:
    """Layer, seed and look."""
    for seed, curve in sorted(evidence.fp8.items()):
        for layer, looks in curve.calls.looks.items():
            yield from ((layer, seed, look) for look in looks)


# -- learning ---------------------------------------------------------------------------------------------------------


def weights_stand_still(evidence: LossEvidence) -> Finding | None:
    """Weights that train in the reference and not in the FP8 arm, with every seed: an expert may rest with one."""
    seeds = sorted(evidence.fp8)
    first, mine = evidence.bf16[seeds[0]].movement, evidence.fp8[seeds[0]].movement
    still = [name for name in first if all(_stands_still(name, evidence, s) for s in seeds)]
    if not still:
        return None
    name = still[0]
    expected = f"weights that move as in BF16, where {first[name].moved:.1%} of {name} have moved at the end"
    seen = f"{mine[name].moved:.1%} in FP8, where {mine[name].reached:.1%} had a gradient: {some(still)}"
    return finding(C.WEIGHTS_STAND_STILL, expected, seen, count=len(still), of=len(first))


def _stands_still(name: str, evidence: LossEvidence, seed: int) -> bool:
    """Not known of a weight of which too little moves in the reference."""
    reference, mine = evidence.bf16[seed].movement[name], evidence.fp8[seed].movement.get(name)
    if mine is None or reference.moved < MOVED / 2 or reference.moved * reference.elements < ENOUGH:
        return False
    return mine.moved < STILL * reference.moved


def nothing_learnt(evidence: LossEvidence) -> Finding | None:
    """The reference's weights hardly move, or its loss does not fall: equal losses then show nothing."""
    curves = [evidence.bf16[s].losses for s in sorted(evidence.bf16)]
    share = _moved_share(evidence.bf16)
    if share is not None and share < MOVED:
        expected = f"at least {MOVED:.0%} of the weights with a gradient differ from their start at the end"
        return finding(C.SMALL_STEPS, expected, f"{share:.1%} after {len(curves[0])} steps", Verdict.NOT_EXERCISED)
    fall = loss_fall(curves)
    if fall.learns:
        return None
    expected = "a loss that falls by more than it changes from step to step"
    seen = f"it {'rises' if fall.amount < 0 else 'falls'} by {abs(fall.amount):.3g} +- {2 * fall.error:.2g}"
    seen += " from the first fifth of the steps to the last"
    return finding(C.NOTHING_LEARNT, expected, seen, Verdict.NOT_EXERCISED)


def _moved_share(curves: Mapping[int, Curve]) -> float | None:
    """Share of an arm's weights that moved, of those with a gradient: 0 where none has one, ``None`` where no weight is
    known."""
    every = [one for curve in curves.values() for one in curve.movement.values()]
    moved = sum(m.elements * m.moved for m in every)
    # A weight that decays moves without a gradient, too: it counts as reached where it moved.
    reached = sum(m.elements * max(m.reached, m.moved) for m in every)
    return (moved / reached if reached else 0.0) if every else None


# -- the whole course -------------------------------------------------------------------------------------------------


def trained_otherwise(evidence: LossEvidence) -> Finding | None:
    """The first difference between the arms' courses that FP8 does not explain, with any seed.

    Not compared with any seed is what differs with one between BF16 and itself with noise of FP8's size: a schedule, or
    a step that is skipped, by a look at the loss.
    """
    noisy = [(evidence.bf16[seed].course, curve.course) for seed, curve in evidence.noisy.items()]
    moved = [one for one in _COMPARED if any(one(*pair) for pair in noisy)]
    for seed in sorted(evidence.fp8):
        for rule in _COMPARED:
            if rule not in moved and (found := rule(evidence.bf16[seed].course, evidence.fp8[seed].course)):
                return found
    # What the optimizer does not step and moves with every seed in one arm alone: a teacher, running statistics.
    for code, in_bf16, seen in ((D.STANDS_STILL, True, "unchanged"), (D.FROZEN_MOVES, False, "changed")):
        if names := _moving(evidence, in_bf16):
            does = "change over a curve" if in_bf16 else "stay as it is over a curve"
            expected = f"{names[0]} to {does}, as in BF16"
            return finding(code, expected, f"{seen} in FP8: {some(names)}", count=len(names))
    return None


def _other_steps(bf16: Course, fp8: Course) -> Finding | None:
    mine, theirs = list(fp8.stepped), list(bf16.stepped)
    if mine == theirs:
        return None
    step = next(i for i, (a, b) in enumerate(zip(theirs, mine, strict=False)) if a != b)
    expected = f"as many steps of the optimizer in both arms; {sum(theirs)} in BF16"
    seen = f"{sum(mine)} in FP8; in training step {step} {theirs[step]} in BF16 and {mine[step]} in FP8"
    return finding(D.OTHER_STEPS, expected, seen, Verdict.INVALID)


def _other_schedule(bf16: Course, fp8: Course) -> Finding | None:
    # Rates that differ from the start are the ledger's, which knows whose they are.
    at, name = _other_rates(bf16, fp8, RATES)
    if not at:
        return None
    reference, seen = (_in_words(name, arm.rates[at]) for arm in (bf16, fp8))
    expected = f"the same settings in both arms; after {at} training steps {reference} in BF16"
    return finding(D.OTHER_RATES, expected, f"{seen} in FP8", Verdict.INVALID)


def _other_state(bf16: Course, fp8: Course) -> Finding | None:
    # An optimizer without any state was made anew, or cleared.
    kept = fp8.state or dict.fromkeys(bf16.state, "")
    other = [name for name in bf16.state if name in kept and bf16.state[name] != kept[name]]
    if not other:
        return None
    reference, seen = (state[other[0]] or "no tensor" for state in (bf16.state, kept))
    expected, seen = f"{other[0]}: {reference}, as in BF16", f"{seen}; so for {some(other)}"
    return finding(D.OTHER_OPTIMIZER_STATE, expected, seen, Verdict.INVALID, count=len(other))


def _other_modes(bf16: Course, fp8: Course) -> Finding | None:
    other = [name for name, training in bf16.modes.items() if fp8.modes.get(name, training) is not training]
    if not other:
        return None
    words = ["eval mode", "train mode"]
    about = f"train or eval mode of {other[0] or 'the model'} at the end of a curve"
    expected = f"{words[bf16.modes[other[0]]]}, as in BF16"
    seen = f"{words[fp8.modes[other[0]]]} in FP8: {some([name or 'the model' for name in other])}"
    return finding(D.OTHER_MODE, expected, seen, Verdict.INVALID, about=about)


def _gradients_left(bf16: Course, fp8: Course) -> Finding | None:
    # A step may well leave all gradients, and clear them at its start.
    if bool(bf16.left) == bool(fp8.left):
        return None
    arm, names = ("FP8", fp8.left) if fp8.left else ("BF16", bf16.left)
    expected = "gradients that are cleared in both arms after a step, or in neither"
    return finding(D.GRADIENTS_LEFT, expected, f"left in {arm}: {some(list(names))}", Verdict.INVALID, arm=arm)


_COMPARED = (_other_steps, _other_schedule, _other_state, _other_modes, _gradients_left)


def _other_rates(one: Course, two: Course, by: float) -> tuple[int, str]:
    """Index and name of the first settings that differ by more than this share; no name where none does."""
    for index, (mine, theirs) in enumerate(zip(one.rates, two.rates, strict=False)):
        for name, a in mine.items():
            b = theirs.get(name, ())
            if len(a) == len(b) and any(abs(x - y) > by * max(abs(x), abs(y)) for x, y in zip(a, b, strict=True)):
                return index, name
    return 0, ""


def _in_words(name: str, rates: Mapping[str, Sequence[float]]) -> str:
    return f"{name} {', '.join(f'{rate:.6g}' for rate in dict.fromkeys(rates[name]))}"


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
    at, changed = _other_rates(first.course, again.course, OTHER_RATE)
    if first.data_at_start != again.data_at_start:
        what, told = "batches", [f"checksum {curve.data_at_start:08x}" for curve in (first, again)]
    elif changed and at == 0:
        what, told = "settings", [_in_words(changed, curve.course.rates[0]) for curve in (first, again)]
    elif apart > limit:
        what = f"losses within {limit:.2g}"
        told = [", ".join(f"{x:.5g}" for x in curve.losses[: len(again.losses)]) for curve in (first, again)]
        told[1] += f": up to {apart:.2g} apart"
    else:
        return None
    expected = f"the {what} of the first steps of seed {first.seed} again: {told[0]}"
    return finding(C.NOT_ANEW, expected, f"{told[1]}, when these were trained again", Verdict.INVALID)


# -- the gap at the end -----------------------------------------------------------------------------------------------


def judge_gap(evidence: LossEvidence) -> LossGap:
    """The rule alone: is the gap at the end of the horizon above the margin? Curves must be finite."""
    fp8, bf16 = ([arm[s].losses for s in sorted(evidence.fp8)] for arm in (evidence.fp8, evidence.bf16))
    noisy = [evidence.noisy[s].losses for s in sorted(evidence.noisy)]
    return compare_curves(fp8, bf16, evidence.least, noisy)


def explain_gap(gap: LossGap, evidence: LossEvidence) -> Finding:
    """The rule's verdict with its lines."""
    seen, which, amount = _seen(gap, evidence), _which_margin(gap, evidence), evidence.amount
    if gap.verdict is Verdict.PASS:
        return passed(f"{seen}, margin {amount(gap.margin).removesuffix(' nats')}{which}")
    if gap.verdict is Verdict.FAIL:
        return finding(C.HIGHER, f"less than {amount(gap.margin)} above BF16{which}", seen)
    if gap.below:
        expected = f"at most {amount(gap.floor)} below BF16: FP8 adds rounding, which does not teach"
        return finding(C.LOWER, expected, seen, Verdict.INCONCLUSIVE)
    code = C.MORE_SEEDS
    if gap.noise > gap.margin:
        code, seen = C.TOO_NOISY, f"{seen}; noise moves BF16's own end by {amount(gap.noise)} (3 sd)"
    if gap.hopeless and len(evidence.fp8) < largest_number(evidence.one_curve):
        seen += f"; so far apart that {MAX_LOSS_SEEDS} seeds are not likely to decide: no further one was trained"
    expected = f"a gap clearly below or above {amount(gap.margin)}{which}"
    return finding(code, expected, seen, Verdict.INCONCLUSIVE)


def _which_margin(gap: LossGap, evidence: LossEvidence) -> str:
    """For a margin that is not the least one in nats: what it is of."""
    if gap.margin > evidence.least:
        by = evidence.amount(gap.noise / OF_NOISE)
        most = "; at most a quarter of what the loss falls by" if gap.margin < gap.noise else ""
        return f" ({OF_NOISE:.0f} times {by}, by which noise of FP8's size moves BF16's own end{most})"
    return "" if evidence.in_nats or not evidence.end else f" ({evidence.least / evidence.end:.1%} of the loss)"


def _seen(gap: LossGap, evidence: LossEvidence) -> str:
    curves = list(evidence.bf16.values())
    # Neither weights nor batches depend on the seed: the spread is that of rounding, not of training.
    what = "runs of one curve, one rounding apart" if evidence.one_curve else "seeds"
    number = ".4f" if evidence.in_nats else ".3g"
    apart = f"{gap.gap:+{number}}{' nats' if evidence.in_nats else ''} +- {gap.bound:{number}}"
    end = fmean(curve.losses[-1] for curve in curves)
    return f"{apart} over {len(curves[0].losses)} steps of {len(curves)} {what} (BF16 ends at {end:.4g})"


# -- what is asked ----------------------------------------------------------------------------------------------------


def loss_of(arms: TwoArms, nats: bool, steps: int = 0) -> Asking[LossEvidence]:
    """Curves that decide: first of the case's own number of seeds, then with one seed more at each look while the
    verdict is INCONCLUSIVE.

    It ends at the largest number of seeds, or where these are not likely to decide either; where the reference learns
    nothing, and FP8 does not seem to end higher; and at the first seed that no further one can mend: with other data in
    an arm, or with numbers that are not finite. ``nats``: whether the loss is a cross-entropy. ``steps``: of each
    curve; 0: the case's own. Where all seeds give one curve, both arms of all but the first start with their weights
    one rounding away, another one for each seed.
    """
    case = replace(arms.case, steps=steps or arms.case.steps)
    fp8: dict[int, Curve] = {}
    bf16: dict[int, Curve] = {}
    one = False
    if arms.takes_turns:
        yield from _reference_first(case)
    for seed in range(max(case.seeds, MAX_LOSS_SEEDS)):
        if seed == 1:
            # The FP8 arm trains meanwhile: with most workloads each seed gives a curve of its own.
            one = yield from _one_curve(case, *([] if arms.takes_turns else [_curve(case, FP8, 1, watch=True)]))
        # Each keeps all its threads: the sums of a convolution depend on their number, and the time does not.
        own = _curve(case, FP8, seed, one, watch=True)
        fp8[seed], bf16[seed] = yield own, _curve(case, REFERENCE, seed, one)
        found = LossEvidence(dict(fp8), dict(bf16), nats=nats, one_curve=one)
        if not (fp8[seed].finite and bf16[seed].finite):
            return found
        if fp8[seed].data != bf16[seed].data:
            break
        enough = seed + 1 >= case.seeds
        if _says_nothing(found, for_sure=not enough):
            break
        if not enough:
            continue
        found = yield from _with_noise(case, found)
        gap = judge_gap(found)
        if gap.verdict is not Verdict.INCONCLUSIVE or gap.hopeless or seed + 1 >= largest_number(one):
            break
    return (yield from _with_starts(case, found))


def _says_nothing(found: LossEvidence, for_sure: bool) -> bool:
    """Whether the answer is NOT EXERCISED: noise and further seeds then change nothing. ``for_sure``: not before the
    reference's loss rises by as much as it would have to fall by."""
    gap = judge_gap(found)
    if gap.gap > gap.margin or (for_sure and not loss_fall([curve.losses for curve in found.bf16.values()]).rises):
        return False
    return check_loss(found).verdict is Verdict.NOT_EXERCISED


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


def _one_curve(case: Case, *meanwhile: Ask) -> Asking[bool]:
    """Whether the reference's first two seeds give one curve, number by number: weights that are loaded or seeded by
    ``build()``, and batches that depend on their step alone."""
    first, second, *_ = yield _curve(case, REFERENCE, 0), _curve(case, REFERENCE, 1), *meanwhile
    return bool(first.losses == second.losses)


def _reference_first(case: Case) -> Asking[None]:
    """Have all that the first look asks of the reference: it is asked before the FP8 arm is built."""
    one = case.seeds > 1 and (yield from _one_curve(case))
    yield tuple(_curve(case, REFERENCE, seed, one and seed > 0) for seed in range(case.seeds))
    yield _again(case)
