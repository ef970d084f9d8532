"""Does the BF16 arm begin each curve anew? What it keeps from one curve spoils all losses after it. Pure."""

from __future__ import annotations

from dataclasses import replace

from pytest_fp8.questions.findings import Finding
from pytest_fp8.questions.loss.course import rates_in_words
from pytest_fp8.questions.loss.evidence import LossEvidence
from pytest_fp8.rules.loss import LossGap, tail_gap
from pytest_fp8.rules.restart import Restart, decide_restart
from pytest_fp8.verdicts import Verdict

HEADLINE = "the BF16 arm does not begin its curves anew"


def does_not_restart(evidence: LossEvidence) -> Finding | None:
    """The reference's second curve of each seed, from weights one rounding away, against its first one: other data,
    other learning rates at the start, or an end that lies apart on one side."""
    return _data(evidence) or _rates(evidence) or _losses(evidence)


def _data(evidence: LossEvidence) -> Finding | None:
    for seed, twin in sorted(evidence.twin.items()):
        first = evidence.bf16[seed]
        if twin.data != first.data:
            return _invalid(
                expected=f"the batches of its first curve of seed {seed} again: checksum {first.data:08x}",
                seen=f"checksum {twin.data:08x} in its second curve of this seed",
                cause="batch(step) takes them from an iterator or a generator of its own, which goes on where the "
                "last curve left it",
                next_step="draw the batch inside batch(step) with torch's own generators, which are seeded for each "
                "step, or index a dataset by the step",
            )
    return None


def _rates(evidence: LossEvidence) -> Finding | None:
    for seed, twin in sorted(evidence.twin.items()):
        for first, again in zip(evidence.bf16[seed].course.rates[:1], twin.course.rates[:1], strict=False):
            if list(first) == list(again):
                continue
            return _invalid(
                expected=f"the rates that its first curve of seed {seed} began with: {rates_in_words(first)}",
                seen=f"its second curve of this seed began with {rates_in_words(again)}",
                cause="a schedule that is made once and goes on from curve to curve",
                next_step="make the schedule where the optimizer is made: Workload(optimizer=...) is called for each "
                "curve",
            )
    return None


def with_doubt(gap: LossGap, evidence: LossEvidence) -> LossGap:
    """The gap as one that does not decide, where it passes and more seeds must tell whether BF16 begins anew."""
    if gap.verdict is Verdict.PASS and _decided(evidence, _gaps(evidence)).doubtful:
        return replace(gap, verdict=Verdict.INCONCLUSIVE)
    return gap


def _losses(evidence: LossEvidence) -> Finding | None:
    gaps = _gaps(evidence)
    found = _decided(evidence, gaps)
    if found.anew:
        return None
    side = "below" if found.gap < 0 else "above"
    limit = max(found.floor, found.bound)
    return _invalid(
        expected=f"a second curve of a seed, from weights one rounding away, that ends within {limit:.3g} of the first",
        seen=f"{abs(found.gap):.3g} {side} it on average over {len(gaps)} seeds: "
        + ", ".join(f"{gap:+.3g}" for gap in gaps),
        cause="it keeps something from one curve for the next that is no parameter, buffer or optimizer state of its "
        "model: moments or an average in the step, master weights, a counter",
        next_step="make such state in Workload(optimizer=...), which is called for each curve, or register it as a "
        "buffer; until then the losses of neither arm can be judged",
    )


def _gaps(evidence: LossEvidence) -> list[float]:
    """What the second runs end higher by than the first ones."""
    pairs = [(evidence.twin[s].losses, evidence.bf16[s].losses) for s in sorted(evidence.twin)]
    if _one_start(evidence):
        # The twin is the first seed's own run there, and the curve of the seed has the moved weights.
        pairs = [pairs[0], *((bf16, twin) for twin, bf16 in pairs[1:])]
    return [tail_gap(again, first) for again, first in pairs]


def _decided(evidence: LossEvidence, gaps: list[float]) -> Restart:
    fp8 = [tail_gap(evidence.fp8[s].losses, evidence.bf16[s].losses) for s in sorted(evidence.fp8)]
    return decide_restart(gaps, fp8, evidence.scale, _one_start(evidence))


def _one_start(evidence: LossEvidence) -> bool:
    """Whether all seeds are one run, so that their curves begin from moved weights and have one twin: the first one."""
    others = [evidence.twin[s].losses for s in sorted(evidence.twin)[1:]]
    return bool(others) and all(list(losses) == list(evidence.bf16[0].losses) for losses in others)


def _invalid(**lines: str) -> Finding:
    return Verdict.INVALID, {"headline": HEADLINE, **lines}
