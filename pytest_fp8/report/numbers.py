"""Numbers out of a report that was read, where they are there and finite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

NONE = "-"
MOST = 1e300
"""No figure of a report is larger."""


def number(data: Any, *path: str) -> float | None:
    """``data[path[0]][path[1]]...`` where that is a number, else ``None``."""
    for name in path:
        data = data.get(name) if isinstance(data, Mapping) else None
    if not isinstance(data, int | float) or isinstance(data, bool):
        return None
    # An integer may be too large to be one: what reads this leaves out what is not finite.
    return float(data) if abs(data) < MOST else None


def numbers(data: Any, *path: str) -> dict[str, float]:
    """The fields of an object that are numbers."""
    for name in path:
        data = data.get(name) if isinstance(data, Mapping) else None
    found = {name: number(data, name) for name in data} if isinstance(data, Mapping) else {}
    return {name: value for name, value in found.items() if value is not None}


def speed_in(decisions: Mapping[str, Any]) -> Any:
    """The decision with the speedup's numbers: against the baseline, or against the floor alone. Empty where neither
    was asked."""
    return decisions.get("speedup") or decisions.get("faster") or {}


def say(text: str, *values: float | None) -> str:
    """``text.format(*values)``; a dash where one is missing."""
    return NONE if None in values else text.format(*values)


def columns(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Rows as tab-separated text to copy into a spreadsheet; nothing for ``None``."""
    texts = [
        ["" if cell is None else f"{cell:.6g}" if isinstance(cell, float) else str(cell) for cell in row]
        for row in rows
    ]
    return "\n".join(
        "\t".join(cell.replace("\t", " ").replace("\n", " ") for cell in row) for row in [list(head), *texts]
    )
