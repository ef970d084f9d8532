"""A new session against a stored baseline: per metric noise or moved, better or worse; which levels begin anew. Pure.

Loads no numpy, so that the command line answers at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from pytest_fp8.baselines.metrics import ACCOUNT, EXACT, METRICS, informational
from pytest_fp8.baselines.record import MAX_SESSIONS, Baseline, StoredSession
from pytest_fp8.libraries import changed_versions
from pytest_fp8.stats.components import MEASURED, Components
from pytest_fp8.stats.estimate import estimate_of, figure


@dataclass(frozen=True)
class Change:
    """One metric, old and new. Ratios (``relative``) change by a fraction, other metrics by their own unit."""

    metric: str
    unit: str
    relative: bool
    old: float | None
    new: float | None
    change: float = 0.0
    half_width: float = 0.0
    """Half the width of the change's interval; of a metric with a tolerance, that."""
    word: str = "noise"
    """``same``, ``noise``, ``moved``, ``better``, ``worse``, ``new``, ``not measured``, or ``removed``."""

    @property
    def moved(self) -> bool:
        """Whether the metric left its stored level."""
        return self.word in ("moved", "better", "worse")


@dataclass(frozen=True)
class Revision:
    """One baseline, old against new."""

    case: str
    gpu: str
    changes: tuple[Change, ...]
    whole: str
    """Why nothing was compared and everything is new: no earlier file, or one of another definition. Else empty."""
    old: StoredSession | None
    """The newest session of the old baseline; ``None`` where nothing was compared."""
    new: StoredSession
    gated: str = "speedup"
    """The metric that the new baseline's speedup is gated on."""
    tampered: str = ""
    """What was done to the old sessions besides appending to them."""

    @property
    def name(self) -> str:
        return f"{self.gpu}/{self.case}"

    @property
    def changed(self) -> bool:
        return bool(self.whole or self.tampered) or any(c.moved or c.word in ("new", "removed") for c in self.changes)

    @property
    def worse(self) -> bool:
        return bool(self.tampered) or any(change.word in ("worse", "removed") for change in self.changes)

    def starts(self) -> list[str]:
        """The metrics that begin a new level: where one of a question's moved that is not informational, all of them
        that the new session measured."""
        moved = {
            METRICS[c.metric].question for c in self.changes if c.moved and not informational(c.metric, self.gated)
        }
        return [name for name in self.new.metrics if METRICS[name].question in moved]

    def origins(self) -> list[str]:
        """Libraries, driver and power limit that differ between old and new."""
        return differing(self.old, self.new) if self.old is not None else []


def revise(
    old: Baseline | None,
    new: Baseline,
    whole: str = "",
    tolerances: Mapping[str, float] | None = None,
    components: Components = MEASURED,
) -> Revision:
    """What the newest session of ``new`` says against the levels in ``old``, metric by metric.

    ``old`` is ``None`` where nothing can be compared; ``whole`` says why. ``tolerances``: those of the case, by metric,
    where they are known; of others the code's own. ``components``: the GPU's. What stands beside a speedup is not
    compared.
    """
    if old is not None and old.case_hash != new.case_hash:
        old, whole = None, "the case was redefined: its old numbers are not compared"
    whole = "" if old is not None else whole or "no earlier baseline"
    changes = []
    for name in sorted({*(old.metrics if old is not None else ()), *new.metrics} - ACCOUNT.keys()):
        held = old.history(name) if old is not None else []
        change = compare_metric(name, held, new.values(name), (tolerances or {}).get(name), components)
        # Of the old side: a file that comes with a change must not be able to silence its own step times.
        if old is not None and change.moved and informational(name, old.gated):
            change = replace(change, word="moved")
        changes.append(change)
    before = old.newest if old is not None else None
    return Revision(new.case, new.gpu, tuple(changes), whole, before, new.newest, new.gated)


def compare_histories(
    old: Baseline | None, new: Baseline, tolerance: float | None = None, components: Components = MEASURED
) -> Revision:
    """As :func:`revise`, of two states of one file: a metric that is gone was removed, and so was a session.
    ``tolerance``: of the speedup, where the case is known."""
    speeds = {} if tolerance is None else {"speedup": tolerance, "busy_speedup": tolerance}
    revision = revise(old, new, tolerances=speeds, components=components)
    if old is None or revision.whole:
        return revision
    changes = tuple(replace(c, word="removed") if c.word == "not measured" else c for c in revision.changes)
    return replace(revision, changes=changes, tampered=tampering(old, new))


def compare_metric(
    name: str,
    old: Sequence[Sequence[Any]],
    new: Sequence[Any],
    tolerance: float | None = None,
    components: Components = MEASURED,
) -> Change:
    """One metric: ``old`` are the values of each session of its level, ``new`` those of one session; either may be
    empty. Log ratios are compared by their noise, others by their tolerance, in nats or as a fraction, and without a
    tolerance by :data:`~pytest_fp8.baselines.metrics.EXACT`."""
    known = METRICS[name]
    allowed = known.tolerance if tolerance is None else tolerance
    first, second = (level(name, values) if values else None for values in (old[-1] if old else (), new))
    if first is None or second is None:
        return Change(name, known.unit, False, first, second, word="new" if first is None else "not measured")
    if known.per_process:
        moved = estimate_of(new, old, components.of(name))
        relative, change, half = True, math.expm1(moved.theta), moved.ratio * math.sinh(moved.half_width)
        first = second / moved.ratio
        beyond_noise = abs(moved.theta) > moved.half_width
        beyond = beyond_noise and abs(moved.theta) > -math.log(1 - allowed)
    else:
        relative, half = allowed > 0 and known.unit != "nats" and first > 0, max(EXACT, allowed)
        change = second / first - 1 if relative else second - first
        beyond_noise = beyond = abs(change) > half
    word = "noise"
    if list(new) == list(old[-1]):
        word = "same"
    elif beyond and not known.informational:
        word = "better" if (change > 0) == (known.direction == "higher") else "worse"
    elif beyond_noise:
        word = "moved"
    return Change(name, known.unit, relative, first, second, change, half, word)


def level(name: str, values: Sequence[Any]) -> float:
    """One number for a metric: the ratio of a log ratio, else the mean."""
    return math.exp(figure(values)) if METRICS[name].per_process else fmean(values)


def differing(old: StoredSession, new: StoredSession) -> list[str]:
    """Libraries, driver and power limit of two sessions that differ: ``torch 2.11.0 -> 2.12.0``."""

    def origins(session: StoredSession) -> dict[str, str]:
        # A session that was measured without a GPU has neither.
        about = {"driver": session.gpu.get("driver"), "power limit": session.gpu.get("power_limit")}
        return {**session.libraries, **{name: str(value) for name, value in about.items() if value is not None}}

    return changed_versions(origins(old), origins(new))


def tampering(old: Baseline, new: Baseline) -> str:
    """What was done to the sessions of ``old`` besides appending to them; empty for nothing. A full file loses its
    oldest sessions."""
    leave = len(old.sessions) if len(new.sessions) == MAX_SESSIONS else 1
    kept = [old.sessions[leaves:] for leaves in range(leave)]
    if old.case_hash != new.case_hash or any(new.sessions[: len(sessions)] == sessions for sessions in kept):
        return ""
    return "its sessions are not the stored ones and then others: git diff shows what was edited or removed"
