"""How far a log ratio moved, with its error: the one estimator of every speed rule. Pure; loads no numpy.

A pair of processes counts with the median of its blocks, a session with the mean of its pairs. The error has the noise
of blocks, what processes differ by and, against a history, what sessions differ by. The gate, base against head, the
review of a new baseline, the tolerance that a history can hold and ``benchmarks/gate`` all stand on :func:`spread`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from pytest_fp8.stats.components import MEASURED, Components, Process, Session
from pytest_fp8.stats.quantiles import (
    chi_square_quantile,
    median_variance,
    pooled_variance,
    robust_variance,
    student_quantile,
)

WILD = 0.01
"""Chance that a case which spreads like the others is taken to spread more. Cases are alike unless one's own values say
otherwise beyond chance."""
MOST_FREEDOM = 200
"""Degrees of freedom beyond which Student's t is taken as that of so many: 0.02 from the normal quantile."""
DISPLAYED = 0.99
"""Confidence of the intervals that are shown."""


@dataclass(frozen=True)
class Estimate:
    """``theta``: log ratio now less before. ``each``: the same of every pair of the run."""

    theta: float
    error: float
    freedom: int
    each: tuple[float, ...] = ()
    own_error: float = 0.0
    """Of ``error``, what comes of processes and not of sessions."""

    def quantile(self, p: float) -> float:
        return student_quantile(p, self.freedom)

    @property
    def half_width(self) -> float:
        """Of the shown interval of :attr:`theta`."""
        return self.quantile(1 - (1 - DISPLAYED) / 2) * self.error

    @property
    def ratio(self) -> float:
        return math.exp(self.theta)

    @property
    def interval(self) -> tuple[float, float]:
        """Of the ratio."""
        return math.exp(self.theta - self.half_width), math.exp(self.theta + self.half_width)

    @property
    def change(self) -> float:
        """As a fraction: -0.03 where the speed is 3 % less."""
        return math.expm1(self.theta)

    @property
    def change_interval(self) -> tuple[float, float]:
        low, high = self.interval
        return low - 1, high - 1


@dataclass(frozen=True)
class Spread:
    """Variances of log ratios: one pair's median in the run and in the history, and one session's effect."""

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


def log_ratios(reference: Sequence[float], fp8: Sequence[float]) -> list[float]:
    """One log ratio per ABBA block: the mean log of its two reference times less that of its two FP8 times.

    Both are milliseconds per step in the order taken, two entries a block. A drift that is linear in time over a block
    cancels, since the arms' mean times within it are equal. Raises ``ValueError`` where the entries do not pair.
    """
    if len(reference) != len(fp8) or len(reference) % 2:
        raise ValueError(f"blocks come in pairs: {len(reference)} reference and {len(fp8)} FP8 times")
    logs = [math.log(slow) - math.log(fast) for slow, fast in zip(reference, fp8, strict=True)]
    return [(one + two) / 2 for one, two in zip(logs[::2], logs[1::2], strict=True)]


def ratios_by_process(reference: Sequence[Sequence[float]], fp8: Sequence[Sequence[float]]) -> list[list[float]]:
    """:func:`log_ratios` of each fresh pair of processes."""
    return [log_ratios(mine, theirs) for mine, theirs in zip(reference, fp8, strict=True)]


def figure(session: Session) -> float:
    """The log ratio that a session measured: the mean of its pairs' medians."""
    return fmean(median(process) for process in session)


def level(history: Sequence[Session]) -> float:
    """The log ratio that a history stands for: the mean of its sessions."""
    return fmean(figure(session) for session in history)


def estimate_of(run: Session, history: Sequence[Session] = (), components: Components = MEASURED) -> Estimate:
    """The run against the mean of the history's sessions. Without a history: the run alone, with the error of its
    processes; so for two sides that took turns in one session."""
    found = spread(run, history, components)
    before = level(history) if history else 0.0
    sessions, processes = error_parts(found, len(run), [len(session) for session in history])
    each = tuple(median(process) - before for process in run)
    error, freedom = math.sqrt(sessions + processes), found.freedom(sessions, processes)
    return Estimate(fmean(each), error, freedom, each, math.sqrt(processes))


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


def error_parts(found: Spread, run: int, history: Sequence[int]) -> tuple[float, float]:
    """Variance of a change that comes of sessions, and of processes. ``run``, ``history``: numbers of pairs."""
    count = len(history)
    sessions = found.session * (1 + 1 / count) if count else 0.0
    return sessions, found.run / run + sum(found.stored / n for n in history) / max(1, count) ** 2


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
