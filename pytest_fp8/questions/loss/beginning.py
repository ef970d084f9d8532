"""The first steps: are the arms alike before they train, and does the reference begin each curve anew? Pure.

Both are held to the same yardstick: how far noise of FP8's size moves the reference's own first losses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

from pytest_fp8.codes import C
from pytest_fp8.questions.findings import finding
from pytest_fp8.questions.loss.course import rates_in_words
from pytest_fp8.questions.loss.evidence import Curve, LossEvidence
from pytest_fp8.stats.loss import root_mean_square
from pytest_fp8.verdicts import Finding, Verdict

FIRST_STEP = 0.02
"""Difference of the first step's loss, as a share of the reference's largest, up to which nothing else is asked."""
OF_NOISE = (4.0, 8.0)
"""First losses of the arms: INCONCLUSIVE, and FAIL, from so many times what noise does to the reference's own (root
mean squares over seeds)."""
ANOTHER_START = 2.0
"""Losses of a start that is trained again: another one from so many times what noise does to that start."""
OTHER_RATE = 0.01
"""Relative difference of two learning rates that a schedule makes. A rate that is derived from the weights differs by
their rounding, 2**-8 and less."""
DATA = {
    "cause": "batch(step) takes them from an iterator or a generator of its own, which goes on where the last curve "
    "left it",
    "next_step": "draw the batch inside batch(step) with torch's own generators, which are seeded for each step, or "
    "index a dataset by the step",
}
RATES = {
    "cause": "a schedule, or a step that sets rates, goes on from curve to curve",
    "next_step": "make the schedule where the optimizer is made, in Workload(optimizer=...), and give it as "
    "optimizer.scheduler, which begins each curve anew",
}


def needs_noise(evidence: LossEvidence) -> bool:
    """Whether a difference of the first losses, or of a start that was trained again, needs the yardstick. Most
    models' do not, and their reference is not asked."""
    apart, enough, _ = _first_losses(evidence)
    return apart > enough or _start_apart(evidence) > 0


def does_not_restart(evidence: LossEvidence) -> Finding | None:
    """The first steps of the reference's first curve against the same steps, trained again after all curves: other
    data, other learning rates at the start, or losses further apart than noise of FP8's size takes them."""
    again, first = evidence.again, _first(evidence)
    if again is None:
        return None
    if first.data_at_start != again.data_at_start:
        expected = f"the batches of its first steps of seed {first.seed} again: checksum {first.data_at_start:08x}"
        seen = f"checksum {again.data_at_start:08x} when these were trained again"
        return finding(C.NOT_ANEW, expected, seen, Verdict.INVALID, **DATA)
    for one, two in zip(first.course.rates[:1], again.course.rates[:1], strict=False):
        if any(abs(a - b) > OTHER_RATE * max(abs(a), abs(b)) for a, b in zip(one, two, strict=False)):
            expected = f"the rates that its first curve of seed {first.seed} began with: {rates_in_words(one)}"
            seen = f"when it was trained again it began with {rates_in_words(two)}"
            return finding(C.NOT_ANEW, expected, seen, Verdict.INVALID, **RATES)
    apart, limit = _start_apart(evidence), ANOTHER_START * _start_noise(evidence)
    if not apart > limit:
        return None
    losses = [", ".join(f"{loss:.5g}" for loss in curve.losses[: len(again.losses)]) for curve in (first, again)]
    expected = f"its first losses of seed {first.seed} again, within {limit:.2g}: {losses[0]}"
    return finding(C.NOT_ANEW, expected, f"{losses[1]}: up to {apart:.2g} apart", Verdict.INVALID)


def first_step(evidence: LossEvidence) -> Finding | None:
    """The arms' first losses lie further apart than FP8's rounding explains."""
    apart, enough, noise = _first_losses(evidence)
    limit = max(enough, OF_NOISE[0] * noise)
    if not apart > limit:
        return None
    pairs = {s: (evidence.bf16[s].losses[0], evidence.fp8[s].losses[0]) for s in sorted(evidence.fp8)}
    seed = max(pairs, key=lambda s: abs(pairs[s][1] - pairs[s][0]))
    amount, (bf16, fp8) = evidence.amount, pairs[seed]
    return Finding(
        C.FIRST_STEP,
        Verdict.FAIL if apart > max(enough, OF_NOISE[1] * noise) else Verdict.INCONCLUSIVE,
        "the arms disagree at the very first step",
        expected=f"{amount(bf16)}, within {amount(limit)}",
        seen=f"{amount(fp8)} at step 0, seed {seed}",
        cause="the arms do not have the same weights or data, or a layer's scale is wrong; or the model keeps "
        "state outside its parameters and buffers (a counter in a Python attribute), which no curve restarts; or "
        "the conversion dropped what a Linear did besides its product: a subclass's own forward, a hook",
        next_step="compare the two models' weights: fp8_pair.fp8.call(lambda model: ...); register such state as "
        "a buffer, or take the step from the batch; move such behaviour out of the Linear, or leave=(its name,)",
    )


def _first(evidence: LossEvidence) -> Curve:
    return evidence.bf16[min(evidence.bf16)]


def _first_losses(evidence: LossEvidence) -> tuple[float, float, float]:
    """How far the arms' first losses lie apart (root mean square over seeds); how far they may without a yardstick; and
    how far noise moves the reference's, 0 where it was not asked."""
    apart = root_mean_square([evidence.fp8[s].losses[0] - evidence.bf16[s].losses[0] for s in sorted(evidence.fp8)])
    largest = root_mean_square([max(map(abs, evidence.bf16[s].losses)) for s in sorted(evidence.fp8)])
    return apart, FIRST_STEP * largest, root_mean_square(list(_moved(evidence)))


def _moved(evidence: LossEvidence) -> Iterator[float]:
    for seed, starts in evidence.noisy_starts.items():
        yield from (start.losses[0] - evidence.bf16[seed].losses[0] for start in starts)


def _start_apart(evidence: LossEvidence) -> float:
    """The largest difference of a loss of the start to that of the same step, trained again."""
    again = evidence.again.losses if evidence.again is not None else ()
    return max((abs(two - one) for one, two in zip(_first(evidence).losses, again, strict=False)), default=0.0)


def _start_noise(evidence: LossEvidence) -> float:
    """How far noise moves these losses, from one draw to the next: an arm that keeps something from curve to curve
    trains none of these as it trained the first one, and each a little further than the one before."""
    starts = evidence.noisy_starts.get(_first(evidence).seed, ())
    moved = [two - one for pair in pairwise(starts) for one, two in zip(*(s.losses for s in pair), strict=True)]
    return root_mean_square(moved) / math.sqrt(2)
