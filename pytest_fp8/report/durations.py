"""Where the time of a session's arms went: a line for the terminal, and plain data for report.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Durations = Mapping[str, Any]
"""``elapsed``; ``waited``: arm -> operation -> seconds; ``builds``: arm -> seconds by phase of each of its builds."""


def added(one: Durations, other: Durations) -> dict[str, Any]:
    """Of two pytest-xdist workers: seconds are added, also those that passed at the same time."""
    if not one or not other:
        return dict(one or other)
    waited: dict[str, dict[str, float]] = {}
    builds: dict[str, list[Any]] = {}
    for each in (one, other):
        for arm, spent in each["waited"].items():
            mine = waited.setdefault(arm, {})
            mine |= {what: mine.get(what, 0.0) + seconds for what, seconds in spent.items()}
        for arm, built in each["builds"].items():
            builds.setdefault(arm, []).extend(built)
    return {"elapsed": one["elapsed"] + other["elapsed"], "waited": waited, "builds": builds}


def time_in_arms(spent: Mapping[str, float]) -> str:
    """The operations that took at least half a second, largest first, in a line; empty where none did."""
    parts = sorted(spent.items(), key=lambda item: -item[1])
    named = ", ".join(f"{what} {seconds:.0f} s" for what, seconds in parts if seconds >= 0.5)
    return f"time in arms: {named}" if named else ""
