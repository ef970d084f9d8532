"""Variance components of a log ratio: between blocks, processes and sessions, pooled over all cases of a GPU. Pure.

    log ratio = the case's own level + the session's effect + the process's effect + the block's noise

A session is one run on one machine. Loads no numpy: the command line, which must answer at once, needs it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

from pytest_fp8.stats.quantiles import median_variance, normal_quantile, robust_variance

Process = Sequence[float]
"""One fresh pair of processes: the log ratio of each of its blocks."""
Session = Sequence[Process]
History = Mapping[Any, Session]
"""One case: session -> its processes, the oldest first."""
KEPT = 0.9
"""Share of the squared residuals that an estimate uses, from the smallest up: one wild case in ten does not move it."""


@dataclass(frozen=True)
class Components:
    """Standard deviations of log ratios, so about fractions, and the degrees of freedom that each stands on."""

    session: float
    process: float
    """Beyond what the noise between blocks explains."""
    block: float
    sessions: int
    processes: int
    blocks: int
    busy: float = 0.0
    """As ``session``, of busy times: a GPU that waits for its host runs at higher clocks, by how long it waits."""
    busy_sessions: int = 0

    def of(self, metric: str) -> Components:
        """For the baselines' metric ``speedup`` or ``busy_speedup``."""
        return self.of_busy() if metric == "busy_speedup" else self

    def of_busy(self) -> Components:
        """The components of cases that are judged by busy time."""
        return replace(self, session=self.busy, sessions=self.busy_sessions)


MEASURED = Components(
    session=0.0034,
    process=0.0015,
    block=0.0080,
    sessions=11,
    processes=57,
    blocks=846,
    busy=0.0061,
    busy_sessions=7,
)
"""Measured on H200s on 20 and 21 November 2026, of busy times on H100s and H200s on 22 and 23 November
(docs/limits.md): what counts where a GPU has no sessions of its own, and beside few of them."""


def components_of(steps: Sequence[History], busy: Sequence[History]) -> Components:
    """The components of one GPU. ``steps``: histories of the cases that are judged by step time; ``busy``: of those
    that are judged by busy time, whose sessions differ by more: how long a GPU waits moves its clocks."""
    both, of_steps, own = estimate([*steps, *busy]), estimate(steps), estimate(busy, prior=None)
    # Either, and not both: what was measured so far is of sessions that these histories may have.
    few = own.sessions <= MEASURED.busy_sessions
    return replace(
        both,
        session=of_steps.session,
        sessions=of_steps.sessions,
        # A busy time is one of a single step, and no block.
        block=of_steps.block,
        blocks=of_steps.blocks,
        busy=MEASURED.busy if few else own.session,
        busy_sessions=MEASURED.busy_sessions if few else own.sessions,
    )


def estimate(histories: Sequence[History], prior: Components | None = MEASURED) -> Components:
    """The components that these histories show.

    Few sessions say little of how sessions differ, and few processes of how these do: their variances are averaged with
    ``prior``'s, each by its degrees of freedom. Where no case has a second block, ``prior`` alone speaks of these.
    """
    sessions = [session for history in histories for session in history.values()]
    blocks = [[(x, 0.0) for x in process] for session in sessions for process in session]
    medians = [[(median(process), _block_part([process])) for process in session] for session in sessions]
    process = _excess(medians)
    between = [[_figure(session, process) for session in history.values()] for history in histories]
    found = Components(
        session=_excess(between),
        process=process,
        block=_excess(blocks),
        sessions=_freedom(between),
        processes=_freedom(medians),
        blocks=_freedom(blocks),
    )
    return found if prior is None else _with_prior(found, prior)


def _with_prior(found: Components, prior: Components) -> Components:
    sessions, processes = found.sessions + prior.sessions, found.processes + prior.processes
    session = (found.sessions * found.session**2 + prior.sessions * prior.session**2) / sessions
    process = (found.processes * found.process**2 + prior.processes * prior.process**2) / processes
    known = replace(
        found,
        session=math.sqrt(session),
        sessions=sessions,
        process=math.sqrt(process),
        processes=processes,
        busy=prior.busy,
        busy_sessions=prior.busy_sessions,
    )
    return known if found.blocks else replace(known, block=prior.block, blocks=prior.blocks)


Known = tuple[float, float]
"""A value, and the variance in it that is explained already."""


def _figure(session: Session, process: float) -> Known:
    """A session's log ratio with the variance that its few processes leave in it."""
    return fmean(median(x) for x in session), (process**2 + _block_part(session)) / len(session)


def _block_part(session: Session) -> float:
    """Variance of one process's median that the noise between its blocks explains."""
    return fmean(robust_variance(process) * median_variance(len(process)) for process in session)


def _freedom(groups: Sequence[Sequence[Known]]) -> int:
    return sum(max(0, len(group) - 1) for group in groups)


def _excess(groups: Sequence[Sequence[Known]]) -> float:
    """Standard deviation of the values of a group beyond what is known of each; pooled over groups, and trimmed.

    The variance at which the residuals' squares, each over what is expected of it, average one (Mandel & Paule 1982),
    with the largest tenth left out and what a normal distribution loses by that put back.
    """
    residuals = []
    for group in groups:
        count = len(group)
        if count < 2:
            continue
        middle, known = fmean(x for x, _ in group), sum(v for _, v in group) / count**2
        residuals += [((x - middle) ** 2, 1 - 1 / count, v * (1 - 2 / count) + known) for x, v in group]
    if not residuals:
        return 0.0
    kept = math.ceil(KEPT * len(residuals))
    expected = kept * _trimmed_square(kept / len(residuals))
    low, high = 0.0, 2 * max(square / share for square, share, _ in residuals)
    if not any(v for _, _, v in residuals):
        return math.sqrt(sum(sorted(square / share for square, share, _ in residuals)[:kept]) / expected)
    for _ in range(40):
        variance = (low + high) / 2
        squares = sorted(square / max(variance * share + v, 1e-30) for square, share, v in residuals)
        low, high = (variance, high) if sum(squares[:kept]) > expected else (low, variance)
    return math.sqrt(high) if low else 0.0


def _trimmed_square(kept: float) -> float:
    """Mean square of standard normal values of which only the smallest ``kept``, a share, are left."""
    if kept >= 1:
        return 1.0
    z = normal_quantile((1 + kept) / 2)
    return 1 - 2 * z * math.exp(-z * z / 2) / math.sqrt(2 * math.pi) / kept
