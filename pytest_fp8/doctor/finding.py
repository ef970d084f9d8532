"""One thing that the doctor found."""

from __future__ import annotations

from dataclasses import dataclass

OK, NOTE, PROBLEM = "ok", "note", "problem"


@dataclass(frozen=True)
class Finding:
    """``state``: ``ok``, ``note`` (nothing fails, and a person should know) or ``problem`` (exit code 1)."""

    topic: str
    state: str
    text: str
    next_step: str = ""
