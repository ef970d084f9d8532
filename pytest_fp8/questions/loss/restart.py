"""Does the BF16 arm begin each curve anew? What it keeps from one curve spoils all losses after it. Pure."""

from __future__ import annotations

from dataclasses import replace

from pytest_fp8.codes import C
from pytest_fp8.questions.findings import Words, tell
from pytest_fp8.questions.loss.course import rates_in_words
from pytest_fp8.questions.loss.evidence import LossEvidence
from pytest_fp8.stats.loss import LossGap, tail_gap
from pytest_fp8.stats.restart import Restart, decide_restart
from pytest_fp8.verdicts import Finding, Verdict

HEADLINE = "the BF16 arm does not begin its curves anew"
OTHER_RATE = 0.01
"""Relative difference of two learning rates that a schedule makes. A rate that is derived from the weights differs by
their rounding, 2**-8 and less."""


DATA: Words = {
    C.NOT_ANEW: (
        HEADLINE,
        "batch(step) takes them from an iterator or a generator of its own, which goes on where the last curve left it",
        "draw the batch inside batch(step) with torch's own generators, which are seeded for each step, or index a "
        "dataset by the step",
    )
}
RATES: Words = {
    C.NOT_ANEW: (
        HEADLINE,
        "a schedule, or a step that sets rates, goes on from curve to curve",
        "make the schedule where the optimizer is made, in Workload(optimizer=...), and give it as "
        "optimizer.scheduler, which begins each curve anew",
    )
}
LOSSES: Words = {
    C.NOT_ANEW: (
        HEADLINE,
        "it keeps something from one curve for the next that is no parameter, buffer or optimizer state of its model: "
        "moments or an average in the step, master weights, a counter",
        "keep such state in a buffer of the model, or in the optimizer's state or groups, which all begin each curve "
        "anew; until then the losses of neither arm can be judged",
    )
}


def does_not_restart(evidence: LossEvidence) -> Finding | None:
    """The reference's second curve of each seed, from weights one rounding away, against its first one: other data,
    other learning rates at the start, or an end that lies lower each time."""
    seeds = _trained_twice(evidence)
    for seed in seeds:
        first, again = evidence.bf16[seed].data, evidence.twin[seed].data
        if first != again:
            expected = f"the batches of its first curve of seed {seed} again: checksum {first:08x}"
            seen = f"checksum {again:08x} in its second curve of this seed"
            return tell(DATA, C.NOT_ANEW, expected, seen, Verdict.INVALID)
    for seed in seeds:
        rates = (arm[seed].course.rates[:1] for arm in (evidence.bf16, evidence.twin))
        for one, two in zip(*rates, strict=False):
            if any(abs(a - b) > OTHER_RATE * max(abs(a), abs(b)) for a, b in zip(one, two, strict=False)):
                expected = f"the rates that its first curve of seed {seed} began with: {rates_in_words(one)}"
                seen = f"its second curve of this seed began with {rates_in_words(two)}"
                return tell(RATES, C.NOT_ANEW, expected, seen, Verdict.INVALID)
    found = _decided(evidence)
    if found.anew:
        return None
    gaps, most = _gaps(evidence), f"{max(found.floor, found.bound):.3g}"
    expected = f"a second curve of a seed, from weights one rounding away, that ends at most {most} below the first"
    each = ", ".join(f"{gap:+.3g}" for gap in gaps)
    seen = f"{-found.gap:.3g} below it on average over {len(gaps)} seeds: {each}"
    return tell(LOSSES, C.NOT_ANEW, expected, seen, Verdict.INVALID)


def with_doubt(gap: LossGap, evidence: LossEvidence) -> LossGap:
    """The gap as one that does not decide, where more seeds must tell whether BF16 begins anew."""
    return replace(gap, verdict=Verdict.INCONCLUSIVE) if _decided(evidence).doubtful else gap


def _gaps(evidence: LossEvidence) -> list[float]:
    """What the second runs end higher by than the first ones."""
    own = _trained_twice(evidence)
    # The twin of a seed that is no run of its own is the first seed's, and the seed's curve has the moved weights.
    pairs = [(evidence.twin[s], evidence.bf16[s])[:: 1 if s in own else -1] for s in sorted(evidence.twin)]
    return [tail_gap(again.losses, first.losses) for again, first in pairs]


def _decided(evidence: LossEvidence) -> Restart:
    one_start = len(_trained_twice(evidence)) < len(evidence.twin)
    return decide_restart(_gaps(evidence), evidence.scale, one_start)


def _trained_twice(evidence: LossEvidence) -> list[int]:
    """Seeds whose twin is a second run of theirs. Where all give one curve, the twin of the others is that curve."""
    return sorted(evidence.twin)[: 1 if evidence.one_curve else None]
