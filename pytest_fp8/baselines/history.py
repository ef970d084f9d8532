"""A baseline's sessions over time: a new one is appended, none is changed or removed. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pytest_fp8.baselines.metrics import METRICS
from pytest_fp8.baselines.record import MAX_SESSIONS, Baseline, StoredSession


def appended(old: Baseline | None, new: Baseline, starts: Sequence[str]) -> Baseline:
    """``old`` with the newest session of ``new`` behind its own; ``starts``: the metrics that begin a new level in it.

    ``old`` is ``None`` where nothing can be compared: then the session is the first. Where the file is full the oldest
    session leaves. Call :func:`why_not_appended` first.
    """
    session = replace(new.newest, starts=tuple(sorted(starts)))
    before = old.sessions if old is not None else ()
    return replace(new, sessions=(*before, session)[-MAX_SESSIONS:])


def why_not_appended(old: Baseline | None, new: StoredSession) -> str:
    """Why a session cannot be added to a baseline, or an empty string."""
    if old is None:
        return ""
    if any(session.run == new.run for session in old.sessions):
        return "this session is stored already"
    if len(old.sessions) < MAX_SESSIONS:
        return ""
    oldest, *others = old.sessions
    lost = sorted(_questions(oldest) - _questions(new).union(*map(_questions, others)))
    if lost:
        return (
            f"the file holds {MAX_SESSIONS} sessions, and the oldest, which would leave it, is the only one that "
            f"answered {' and '.join(lost)}; run all tests of the case in one session"
        )
    return ""


def tampering(old: Baseline, new: Baseline, candidate: bool = False) -> list[str]:
    """What was done to the sessions of ``old`` besides appending to them, one line each. A full file loses its oldest
    sessions, as many as were appended. ``candidate``: ``new`` is one, which may have been promoted since."""
    if old.case_hash != new.case_hash:
        return []
    new = _as_promoted(old, new) if candidate else new
    first = next((i for i, session in enumerate(old.sessions) if session in new.sessions), len(old.sessions))
    leaves = first if len(new.sessions) == MAX_SESSIONS and _continues(old.sessions[first:], new.sessions) else 0
    kept = old.sessions[leaves:]
    found = [_gone(session, old, new) for session in kept if session not in new.sessions]
    if not found and not _continues(kept, new.sessions):
        found = [f"the session of {s.origin} was put before older ones" for s in new.sessions if s not in old.sessions]
        found = found or ["its sessions stand in another order"]
    return found


def _as_promoted(old: Baseline, new: Baseline) -> Baseline:
    """``new`` with the reason that its newest session was promoted with, where ``old`` has it."""
    promoted = (session for session in old.sessions if replace(session, reason=new.newest.reason) == new.newest)
    return replace(new, sessions=(*new.sessions[:-1], next(promoted, new.newest)))


def _continues(kept: Sequence[StoredSession], now: Sequence[StoredSession]) -> bool:
    """Whether ``now`` is these sessions and then others."""
    return bool(kept) and tuple(now[: len(kept)]) == tuple(kept)


def _gone(session: StoredSession, old: Baseline, new: Baseline) -> str:
    """What became of a stored session that is not there any more as it was."""
    names = ("date", "commit")
    for other in new.sessions:
        if other not in old.sessions and all(getattr(other, name) == getattr(session, name) for name in names):
            return f"the session of {session.origin} was edited: {', '.join(_edited(session, other))}"
    return f"the session of {session.origin} was removed or edited"


def _edited(old: StoredSession, new: StoredSession) -> list[str]:
    metrics = sorted({*old.metrics, *new.metrics})
    named = [name for name in metrics if old.metrics.get(name) != new.metrics.get(name)]
    fields = [name for name in vars(old) if name != "metrics" and getattr(old, name) != getattr(new, name)]
    return named + fields


def _questions(session: StoredSession) -> set[str]:
    return {METRICS[name].question for name in session.metrics}
