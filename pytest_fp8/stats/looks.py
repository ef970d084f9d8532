"""When a speed is judged, and what is decided: one sequence of looks for the gate and for base against head. Pure.

Loads no numpy: the command line, which must answer at once, needs some of this.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pytest_fp8.stats.components import MEASURED, Components, Process, Session
from pytest_fp8.stats.estimate import Estimate, error_parts, estimate_of, spread
from pytest_fp8.stats.quantiles import normal_quantile, student_quantile
from pytest_fp8.verdicts import Verdict

ALPHA = 0.01
"""Chance that a session calls any healthy case a regression: over all its gated cases and all their looks."""
BETA = 0.05
"""Chance that a loss of exactly the tolerance passes, over all looks."""
EARLY = 0.02
"""Share of ``ALPHA`` that each look but the last may spend: looks share most of their error, the session's and the
history's, so that the last one keeps the power."""
RUNS_TO_FAIL = 2
"""A finding needs this many pairs of processes, and each of them must show it: one may be slow by chance."""
POWER = 0.85
"""Chance, at the last look, that a loss of the tolerance fails: what a history must offer to gate at a tolerance."""
GATED_CASES = 30
"""Cases that share ``ALPHA`` where a caller does not say how many there are."""
BASELINE_BLOCKS = 8
"""ABBA blocks of each pair of a baseline. It is measured once and used often, so it may cost more."""


@dataclass(frozen=True)
class Looks:
    """A question is judged after so many fresh ``pairs`` of processes, each of so many ABBA ``blocks``."""

    pairs: tuple[int, ...]
    blocks: int

    def last(self, pairs: int) -> bool:
        return pairs >= self.pairs[-1]

    def finding_chance(self, cases: int, last: bool) -> float:
        """Chance that one look at one healthy case may call it slower; ``ALPHA`` is shared among cases and looks."""
        return ALPHA / max(1, cases) * (1 - (len(self.pairs) - 1) * EARLY if last else EARLY)

    def passing_chance(self) -> float:
        """Chance that one look passes a loss of exactly the tolerance."""
        return BETA / len(self.pairs)


GATE = Looks((1, 2, 3, 4), 6)
"""Further blocks of one pair buy little: they do not touch the spread between processes."""
BESIDE = Looks((2, 4, 6), 10)
"""Base against head. Blocks of two FP8 arms differ by more (0.7 % on H200s) than processes do (0.1 %), so that a block
buys more than a pair, which must be built."""


@dataclass(frozen=True)
class Outcome:
    """What is known of a change, and what it proves. ``tolerance``: the loss that was gated on, as a fraction."""

    estimate: Estimate
    verdict: Verdict
    tolerance: float = 0.0


def against_history(
    run: Session,
    history: Sequence[Session],
    *,
    components: Components = MEASURED,
    tolerance: float = 0.02,
    cases: int = GATED_CASES,
    pairs: int = 0,
) -> Outcome:
    """Hold log ratios, of each pair its blocks, against those of earlier sessions, one at least. ``tolerance``: the
    loss that must be caught; where the history cannot hold it, what that can hold. ``pairs``: that were taken, where
    not all have values."""
    estimate = estimate_of(run, history, components)
    # As at the later looks: what a case is gated at does not depend on how soon it passes.
    gated_at = max(tolerance, holds(history, components, cases, max(GATE.blocks, min(map(len, run)))))
    return Outcome(estimate, judge(estimate, gated_at, cases, GATE, pairs), gated_at)


def against_base(pairs: Sequence[Process], tolerance: float, cases: int = 1, looks: Looks = BESIDE) -> Outcome:
    """The same rule where both sides took turns in one session: without a history, and what sessions differ by cancels.
    ``pairs``: of each pair ln(base time / head time) of its blocks. Raises ``ValueError`` for a tolerance that is no
    fraction."""
    if not 0 < tolerance < 1:
        raise ValueError(f"a tolerance is a fraction between 0 and 1, not {tolerance}")
    estimate = estimate_of(pairs)
    return Outcome(estimate, judge(estimate, tolerance, cases, looks), tolerance)


def against_floor(
    run: Session, floor: float, *, components: Components = MEASURED, cases: int = GATED_CASES
) -> Outcome:
    """Hold this session's speedup against one to exceed. PASS and FAIL each need 99 % over all looks."""
    here, bound = estimate_of(run, (), components), math.log(floor)
    chance = GATE.finding_chance(cases, GATE.last(len(run)))
    verdict = Verdict.INCONCLUSIVE
    if here.theta - here.quantile(1 - ALPHA / len(GATE.pairs)) * here.error > bound:
        verdict = Verdict.PASS
    elif (
        len(run) >= RUNS_TO_FAIL
        and max(here.each) < bound
        and here.theta + here.quantile(1 - chance) * here.error < bound
    ):
        verdict = Verdict.FAIL
    return Outcome(here, verdict)


def judge(change: Estimate, tolerance: float, cases: int, looks: Looks, pairs: int = 0) -> Verdict:
    """PASS where a loss of the tolerance is excluded; FAIL where it is not, and a loss is proven, by every pair too;
    IMPROVED where a gain is proven in the same way. A gain that one pair does not show asks for another look, and
    passes at the last. Else INCONCLUSIVE."""
    last = looks.last(pairs or len(change.each))
    margin = change.quantile(1 - looks.finding_chance(cases, last)) * change.error
    agree = len(change.each) >= RUNS_TO_FAIL
    if change.theta > margin and agree and min(change.each) > 0:
        return Verdict.IMPROVED
    if change.theta > margin and not last:
        return Verdict.INCONCLUSIVE
    if change.theta - change.quantile(1 - looks.passing_chance()) * change.error > math.log(1 - tolerance):
        return Verdict.PASS
    return Verdict.FAIL if agree and change.theta < -margin and max(change.each) < 0 else Verdict.INCONCLUSIVE


def holds(
    history: Sequence[Session], components: Components = MEASURED, cases: int = GATED_CASES, blocks: int = GATE.blocks
) -> float:
    """The tolerance that a history can hold, as a fraction: a loss of it fails with probability ``POWER`` at the last
    look, with so many ``blocks`` of each pair."""
    found = spread((), history, components, blocks)
    parts = error_parts(found, GATE.pairs[-1], [len(session) for session in history])
    quantile = student_quantile(1 - GATE.finding_chance(cases, last=True), found.freedom(*parts))
    return 1 - math.exp(-(quantile + normal_quantile(POWER)) * math.sqrt(sum(parts)))


def processes_hold(session: Session, components: Components = MEASURED, busy: bool = False) -> float:
    """The tolerance that the pairs of a session could hold if sessions did not differ, to the tenth of a per cent:
    further sessions never make the history of such a case finer than that. ``busy``: of busy time, of which a gate
    takes as many steps as a baseline."""
    blocks = min(map(len, session)) if busy else GATE.blocks
    return round(holds([session], replace(components, session=0.0), blocks=blocks), 3)
