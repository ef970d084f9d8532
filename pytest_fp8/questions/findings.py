"""The words that findings are made of. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pytest_fp8.codes import Code
from pytest_fp8.verdicts import Finding, Verdict

SHOWN = 4
"""Names quoted in a message before it says how many more there are."""


def finding(
    code: Code,
    expected: str,
    seen: str,
    verdict: Verdict = Verdict.FAIL,
    *,
    cause: str = "",
    next_step: str = "",
    about: str = "",
    **given: Any,
) -> Finding:
    """A finding in the words of its code's page. ``given``: what the page leaves open. ``cause``, ``next_step``: where
    the check knows better."""
    page = code.page
    open_ = {"about": about, **given}
    cause = cause or page.cause.format(**open_)
    return Finding(code, verdict, page.says.format(**open_), expected, seen, cause, next_step or page.instead, about)


def some(names: Any) -> str:
    """The first few names. A list keeps its order and loses its repetitions; anything else is sorted."""
    ordered = list(dict.fromkeys(names)) if isinstance(names, list) else sorted(names)
    more = f" and {len(ordered) - SHOWN} more" if len(ordered) > SHOWN else ""
    return ", ".join(ordered[:SHOWN]) + more


def words(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in values.items())
