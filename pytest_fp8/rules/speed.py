"""The speed rule: measured log ratios of BF16's step time over FP8's, against a floor and a stored history. Pure.

Loads no numpy: the command line, which must answer at once, needs some of this.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pytest_fp8.rules.change import (
    ALPHA,
    BETA,
    RUNS_TO_FAIL,
    Change,
    change_of,
    detectable,
    error_parts,
    finding_chance,
    judge,
    speed_of,
    spread,
)
from pytest_fp8.rules.variance import MEASURED, Components, Session
from pytest_fp8.verdicts import Verdict

GATED_CASES = 30
"""Cases that share ``ALPHA`` where a caller does not say how many there are."""
POWER = 0.85
"""Chance, at the last look, that a loss of the tolerance fails: what a history must offer to gate at a tolerance."""
LOOKS: tuple[tuple[int, int], ...] = ((1, 3), (1, 6), (2, 6), (3, 6), (4, 6))
"""(fresh processes, ABBA blocks per process) of each look. Further blocks of one process buy little: they do not touch
the spread between processes. The looks at one process can pass a case, and never fail one."""
PAIR_LOOKS = LOOKS[1:]
"""The looks that each take a fresh pair of processes; the look before them is at the first blocks of the first pair."""
BASELINE_BLOCKS = 8
"""ABBA blocks of each process of a baseline. It is measured once and used often, so it may cost more."""


@dataclass(frozen=True)
class Speedup:
    """The measured speedup, and what it proves against a floor and a history."""

    here: Change
    """This session's log ratio, with the error of its processes alone."""
    verdict: Verdict
    reason: str
    """What was asked: ``floor``, ``baseline``, or empty."""
    change: Change | None = None
    """Against the history, with the sessions' and the history's own noise; ``None`` without one."""
    tolerance: float = 0.0
    """The loss that was gated on, as a fraction: the tolerance asked for, or what the history can hold."""


def log_ratios(reference: Sequence[float], fp8: Sequence[float]) -> list[float]:
    """One log ratio per ABBA block: the mean log of its two reference times less that of its two FP8 times.

    Both are milliseconds per step in the order taken, two entries a block. A drift that is linear in time over a block
    cancels, since the arms' mean times within it are equal. Raises ``ValueError`` where the entries do not pair.
    """
    if len(reference) != len(fp8) or len(reference) % 2:
        raise ValueError(f"blocks come in pairs: {len(reference)} reference and {len(fp8)} FP8 times")
    import numpy as np

    logs = np.log(np.asarray(reference, dtype=float)) - np.log(np.asarray(fp8, dtype=float))
    return [float(x) for x in (logs[0::2] + logs[1::2]) / 2]


def ratios_by_process(reference: Sequence[Sequence[float]], fp8: Sequence[Sequence[float]]) -> list[list[float]]:
    """:func:`log_ratios` of each fresh pair of processes."""
    return [log_ratios(mine, theirs) for mine, theirs in zip(reference, fp8, strict=True)]


def decide_speedup(
    processes: Session,
    *,
    history: Sequence[Session] = (),
    components: Components = MEASURED,
    tolerance: float = 0.02,
    floor: float | None = None,
    cases: int = GATED_CASES,
) -> Speedup:
    """Compare the measured log ratios with a floor or with a history's; NOT_EXERCISED without either.

    ``processes``: the log ratios of each fresh process's blocks; ``history``: those of earlier sessions.
    ``tolerance``: the loss that must be caught, as a fraction; where the history cannot hold it, what that can hold.
    ``cases``: how many cases of the session are gated; ``ALPHA`` is shared among them and their looks.

    The floor is asked of this session alone, the history with what sessions differ by. Either may be INCONCLUSIVE,
    which asks for another look. See :func:`~pytest_fp8.rules.change.judge`.
    """
    here = speed_of(processes, components)
    if floor is not None:
        if history:
            raise ValueError("a speedup is held against a floor or against a history")
        last = len(processes) >= LOOKS[-1][0]
        return Speedup(here, _against_floor(here, math.log(floor), cases, last), "floor", tolerance=tolerance)
    if not history:
        return Speedup(here, Verdict.NOT_EXERCISED, "", tolerance=tolerance)
    change = change_of(processes, history, components)
    # As at the later looks: what a case is gated at does not depend on how soon it passes.
    blocks = max(LOOKS[-1][1], min(map(len, processes)))
    gated_at = max(tolerance, holds(history, components, cases, blocks))
    return Speedup(here, _against_history(change, gated_at, cases, processes), "baseline", change, gated_at)


def _against_history(change: Change, tolerance: float, cases: int, processes: Session) -> Verdict:
    """At the first look a case passes where a gain of the tolerance is excluded as well, so that later ones find it."""
    verdict = judge(change, tolerance, cases, len(LOOKS), last=len(processes) >= LOOKS[-1][0])
    first = (len(processes), len(processes[0])) <= LOOKS[0]
    gained = change.theta + change.quantile(1 - BETA / len(LOOKS)) * change.error > -math.log(1 - tolerance)
    return Verdict.INCONCLUSIVE if first and gained else verdict


def _against_floor(here: Change, bound: float, cases: int, last: bool) -> Verdict:
    if here.theta - here.quantile(1 - ALPHA / len(LOOKS)) * here.error > bound:
        return Verdict.PASS
    agree = len(here.each) >= RUNS_TO_FAIL and max(here.each) < bound
    beyond = here.theta + here.quantile(1 - finding_chance(cases, len(LOOKS), last)) * here.error < bound
    return Verdict.FAIL if agree and beyond else Verdict.INCONCLUSIVE


def holds(
    history: Sequence[Session], components: Components = MEASURED, cases: int = GATED_CASES, blocks: int = LOOKS[-1][1]
) -> float:
    """The tolerance that a history can hold, as a fraction: a loss of it fails with probability ``POWER`` in a run that
    takes so many ``blocks`` of each process."""
    found = spread((), history, components, blocks)
    processes, _ = LOOKS[-1]
    parts = error_parts(found, processes, [len(session) for session in history])
    return detectable(math.sqrt(sum(parts)), found.freedom(*parts), POWER, cases, len(LOOKS))


def processes_hold(session: Session, components: Components = MEASURED, busy: bool = False) -> float:
    """The tolerance that the processes of a session could hold if sessions did not differ, to the tenth of a per cent:
    further sessions never make the history of such a case finer than that. ``busy``: of busy time, of which a gate
    takes as many steps as a baseline. It takes fewer blocks of step time."""
    blocks = min(map(len, session)) if busy else LOOKS[-1][1]
    return round(holds([session], replace(components, session=0.0), blocks=blocks), 3)
