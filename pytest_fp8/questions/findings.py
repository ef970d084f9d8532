"""What a check found: a verdict with the lines of its message, and the words they are made of. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pytest_fp8.verdicts import Verdict

SHOWN = 4
"""Names quoted in a message before it says how many more there are."""

Finding = tuple[Verdict, dict[str, str]]
"""A verdict, and the fields of a ``Decision`` that explain it: headline, expected, seen, cause, next_step."""


def fail(headline: str, **lines: str) -> Finding:
    return Verdict.FAIL, {"headline": headline, **lines}


def some(names: Any) -> str:
    """The first few names. A list keeps its order and loses its repetitions; anything else is sorted."""
    ordered = list(dict.fromkeys(names)) if isinstance(names, list) else sorted(names)
    more = f" and {len(ordered) - SHOWN} more" if len(ordered) > SHOWN else ""
    return ", ".join(ordered[:SHOWN]) + more


def words(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in values.items())
