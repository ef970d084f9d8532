"""Where the time of a session's arms went: what `--fp8-durations` prints, and the same as plain data in report.json."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from pytest_fp8.arms.stopwatch import BUILD

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


def shares(durations: Durations) -> tuple[float, float]:
    """Of the time since the first arm was started: the shares in which arms answered questions, and were built."""
    built = sum(spent.get(BUILD, 0.0) for spent in durations["waited"].values())
    answered = sum(sum(spent.values()) for spent in durations["waited"].values()) - built
    elapsed = max(durations["elapsed"], answered + built, 1e-9)
    return answered / elapsed, built / elapsed


def duration_lines(durations: Durations) -> list[str]:
    """The session in one line, then a table: each arm's builds by phase and its operations. Empty without arms."""
    if not durations or not durations["waited"]:
        return []
    from rich.console import Console
    from rich.text import Text

    from pytest_fp8.report.tables import lines_of, new_table

    answered, built = shares(durations)
    table = new_table()
    for column in ("arm", "builds", "waited for builds", "in the arm's process", "questions"):
        table.add_column(column, no_wrap=column != "questions")
    for arm, spent in durations["waited"].items():
        builds = durations["builds"].get(arm, [])
        total = {phase: sum(each.get(phase, 0.0) for each in builds) for phases in builds for phase in phases}
        asked = {what: seconds for what, seconds in spent.items() if what != BUILD}
        cells = [arm, str(len(builds) or ""), _seconds(spent.get(BUILD, 0.0)), _parts(total), _parts(asked)]
        table.add_row(*map(Text, cells))
    console = Console(file=io.StringIO(), width=400, highlight=False, no_color=True)
    return [
        f"arms: {durations['elapsed']:.0f} s since the first was started: {answered:.0%} answering questions, "
        f"{built:.0%} being built, {max(0.0, 1 - answered - built):.0%} neither",
        *lines_of(table, console),
    ]


def time_in_arms(spent: Mapping[str, float]) -> str:
    """The operations that took at least half a second, largest first, in a line; empty where none did."""
    parts = sorted(spent.items(), key=lambda item: -item[1])
    named = ", ".join(f"{what} {seconds:.0f} s" for what, seconds in parts if seconds >= 0.5)
    return f"time in arms: {named}" if named else ""


def _parts(spent: Mapping[str, float]) -> str:
    """Largest first, and what is not worth a word left out."""
    parts = sorted(spent.items(), key=lambda item: -item[1])
    return ", ".join(f"{what} {_seconds(seconds)}" for what, seconds in parts if seconds >= 0.05)


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 0.05 else ""
