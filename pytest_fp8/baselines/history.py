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


def tampering(old: Baseline, new: Baseline, candidate: bool = False) -> str:
    """What was done to the sessions of ``old`` besides appending to them; empty for nothing. A full file loses its
    oldest sessions. ``candidate``: ``new`` is one, which may have been promoted since."""
    now = (_as_promoted(old, new) if candidate else new).sessions
    leave = len(old.sessions) if len(now) == MAX_SESSIONS else 1
    kept = [old.sessions[leaves:] for leaves in range(leave)]
    if old.case_hash != new.case_hash or any(now[: len(sessions)] == sessions for sessions in kept):
        return ""
    return "its sessions are not the stored ones and then others: git diff shows what was edited or removed"


def _as_promoted(old: Baseline, new: Baseline) -> Baseline:
    """``new`` with the reason that its newest session was promoted with, where ``old`` has it."""
    promoted = (session for session in old.sessions if replace(session, reason=new.newest.reason) == new.newest)
    return replace(new, sessions=(*new.sessions[:-1], next(promoted, new.newest)))


def _questions(session: StoredSession) -> set[str]:
    return {METRICS[name].question for name in session.metrics}
