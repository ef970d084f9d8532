"""How far a log ratio moved, with its error, and what that proves: the one estimator of every speed rule. Pure.

The gate against a history, the comparison in one session, the review of a new baseline, the tolerance that a history
can hold and ``benchmarks/gate`` all stand on :func:`spread`. Loads no numpy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from pytest_fp8.rules.statistics import (
    chi_square_quantile,
    median_variance,
    normal_quantile,
    pooled_variance,
    robust_variance,
    student_quantile,
)
from pytest_fp8.rules.variance import MEASURED, Components, Process, Session
from pytest_fp8.verdicts import Verdict

ALPHA = 0.01
"""Chance that a session calls any healthy case a regression: over all its gated cases and all their looks."""
BETA = 0.05
"""Chance that a loss of exactly the tolerance passes, over all looks."""
EARLY = 0.02
"""Share of ``ALPHA`` that a look before the last may spend on a finding. What looks have in common, the session and the
history, is most of a change's error: more processes hardly change a finding, so that the last look keeps the power."""
RUNS_TO_FAIL = 2
"""A finding needs this many processes, and each of them must show it: one process may be slow by chance."""
WILD = 0.01
"""Chance that a case which spreads like the others is taken to spread more. In 71 measurements of two processes on
H200s the logarithms of the processes' variances, each over what the noise between their own blocks lets one expect,
vary by 4.1; chance alone gives 4.9 +- 1.4. So cases are alike unless one's own values say otherwise beyond chance."""
MOST_FREEDOM = 200
"""Degrees of freedom beyond which Student's t is taken as that of so many: 0.02 from the normal quantile."""
DISPLAYED = 0.99
"""Confidence of the intervals that are shown."""


@dataclass(frozen=True)
class Spread:
    """Variances of log ratios: one process's median in the run and in the history, and one session's effect."""

    run: float
    stored: float
    session: float
    run_freedom: float
    """Degrees of freedom of ``run`` and ``stored``."""
    session_freedom: float

    def freedom(self, session: float, process: float) -> int:
        """Degrees of freedom of a sum of two variances (Satterthwaite 1946)."""
        parts = session**2 / self.session_freedom + process**2 / self.run_freedom
        return max(1, min(MOST_FREEDOM, round((session + process) ** 2 / parts))) if parts else MOST_FREEDOM


@dataclass(frozen=True)
class Change:
    """``theta``: log ratio now less before. ``each``: the same of every process of the run."""

    theta: float
    error: float
    freedom: int
    each: tuple[float, ...] = ()
    own_error: float = 0.0
    """Of ``error``, what comes of processes and not of sessions."""

    def half_width(self, confidence: float = DISPLAYED) -> float:
        return self.quantile(1 - (1 - confidence) / 2) * self.error

    def quantile(self, p: float) -> float:
        return student_quantile(p, self.freedom)

    @property
    def ratio(self) -> float:
        return math.exp(self.theta)

    @property
    def interval(self) -> tuple[float, float]:
        """Of the ratio, at the confidence ``DISPLAYED``."""
        return math.exp(self.theta - self.half_width()), math.exp(self.theta + self.half_width())


def figure(session: Session) -> float:
    """The log ratio that a session measured: the mean of its processes' medians."""
    return fmean(median(process) for process in session)


def level(history: Sequence[Session]) -> float:
    """The log ratio that a history stands for: the mean of its sessions."""
    return fmean(figure(session) for session in history)


def spread(run: Session, history: Sequence[Session], components: Components, blocks: int = 0) -> Spread:
    """What is known of a case's variances: the pooled components, and more where the case's own values spread more.

    ``run`` may be empty: then the variance of a run of so many ``blocks`` is told from the history alone.
    The noise between blocks is the case's own, of which dozens of blocks tell; the run takes its own where that is
    larger.
    """
    stored = [process for session in history for process in session]
    noise = _noise([*run, *stored], components)
    own = _noise(run, components) if run else 0.0
    mine = components.process**2 + max(noise, own) * median_variance(blocks or _blocks(run))
    theirs = components.process**2 + noise * median_variance(_blocks(stored or run))
    sessions = [session for session in (run, *history) if len(session) > 1]
    freedom = sum(len(session) - 1 for session in sessions)
    if freedom:
        expected = sum((len(s) - 1) * (mine if s is run else theirs) for s in sessions) / freedom
        seen = pooled_variance([[median(process) for process in session] for session in sessions])
        scale = _scale(seen, expected, freedom)
        mine, theirs = mine * scale, theirs * scale
    session = components.session**2
    if session and len(history) > 1:
        seen = pooled_variance([[figure(s) for s in history]])
        session *= _scale(seen, session + theirs * fmean(1 / len(s) for s in history), len(history) - 1)
    return Spread(mine, theirs, session, components.processes + freedom, components.sessions)


def change_of(run: Session, history: Sequence[Session], components: Components = MEASURED) -> Change:
    """The run against the mean of the history's sessions. Without a history: the run alone, with the error of its
    processes; so for two sides that took turns in one session."""
    found = spread(run, history, components)
    before = level(history) if history else 0.0
    sessions, processes = error_parts(found, len(run), [len(session) for session in history])
    each = tuple(median(process) - before for process in run)
    error, freedom = math.sqrt(sessions + processes), found.freedom(sessions, processes)
    return Change(fmean(each), error, freedom, each, math.sqrt(processes))


def speed_of(session: Session, components: Components = MEASURED) -> Change:
    """One session's log ratio with the error of its processes alone."""
    return change_of(session, (), components)


def elsewhere(session: Session, components: Components = MEASURED) -> Change:
    """One session's log ratio with its error as a figure for other sessions, too."""
    here = speed_of(session, components)
    found = spread(session, (), components)
    freedom = found.freedom(found.session, here.error**2)
    return replace(here, error=math.hypot(here.error, components.session), freedom=freedom)


def error_parts(found: Spread, run: int, history: Sequence[int]) -> tuple[float, float]:
    """Variance of a change that comes of sessions, and of processes. ``run``, ``history``: numbers of processes."""
    count = len(history)
    sessions = found.session * (1 + 1 / count) if count else 0.0
    return sessions, found.run / run + sum(found.stored / n for n in history) / max(1, count) ** 2


def judge(change: Change, tolerance: float, cases: int, looks: int, last: bool) -> Verdict:
    """PASS where a loss of the tolerance is excluded; FAIL where it is not, and a loss is proven, by every process too;
    IMPROVED where a gain is proven in the same way. A gain that one process does not show asks for another look, and
    passes at the last. Else INCONCLUSIVE."""
    margin = change.quantile(1 - finding_chance(cases, looks, last)) * change.error
    agree = len(change.each) >= RUNS_TO_FAIL
    if change.theta > margin and agree and min(change.each) > 0:
        return Verdict.IMPROVED
    if change.theta > margin and not last:
        return Verdict.INCONCLUSIVE
    if change.theta - change.quantile(1 - BETA / looks) * change.error > math.log(1 - tolerance):
        return Verdict.PASS
    return Verdict.FAIL if agree and change.theta < -margin and max(change.each) < 0 else Verdict.INCONCLUSIVE


def finding_chance(cases: int, looks: int, last: bool) -> float:
    """Chance that one look at one healthy case may call it slower; ``ALPHA`` is shared among cases and looks."""
    return ALPHA / max(1, cases) * (1 - (looks - 1) * EARLY if last else EARLY)


def _noise(processes: Sequence[Process], components: Components) -> float:
    """Variance between blocks within a process, by their median absolute deviations; a process counts by its blocks."""
    kept = [process for process in processes if len(process) > 1]
    if not kept:
        return components.block**2
    return sum(robust_variance(process) * len(process) for process in kept) / sum(map(len, kept))


def _blocks(processes: Sequence[Process]) -> int:
    return min(len(process) for process in processes)


def _scale(seen: float, expected: float, freedom: int) -> float:
    """By how much a case's own variance is larger than expected; 1 unless it is so beyond chance."""
    beyond = expected and freedom * seen / expected > chi_square_quantile(1 - WILD, freedom)
    return seen / expected if beyond else 1.0


def detectable(error: float, freedom: int, power: float, cases: int, looks: int) -> float:
    """The loss, as a fraction, that the last look fails with probability ``power``."""
    quantile = student_quantile(1 - finding_chance(cases, looks, last=True), freedom)
    return 1 - math.exp(-(quantile + normal_quantile(power)) * error)
