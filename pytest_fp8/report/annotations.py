"""Annotations of a pull request on GitHub: what failed and what has no answer, at the lines of the tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LONGEST = 4000
"""Characters of one message."""
UNANSWERED = {"error": ("invalid", "inconclusive", "not exercised"), "warning": ("invalid", "inconclusive")}
"""Tests that passed without an answer, by kind. Where they fail nothing, one that needs a baseline is no news."""
OTHERS = "pytest_github_actions_annotate_failures"
"""The plugin that annotates every failed test."""


def below(path: Path, folder: Path) -> str:
    """A path below ``folder`` relative to it; any other as it is."""
    return str(path.relative_to(folder) if path.is_relative_to(folder) else path)


def commands(
    stats: Mapping[str, Sequence[Any]], root: Path, environment: Mapping[str, str], problems: bool, failures: bool
) -> list[str]:
    """A workflow command for each FP8 test that failed, unless these ``failures`` are left to others, and for each that
    has no answer: an error where the session has ``problems``, else a warning. Empty outside of GitHub's runners.

    ``stats``: the reports of pytest's terminal reporter by kind.
    """
    if environment.get("GITHUB_ACTIONS") != "true":
        return []
    # GitHub wants paths from the top of the checkout, pytest has them from its own root.
    top = Path(environment.get("GITHUB_WORKSPACE") or root)
    told = (report for kind in ("failed", "error") for report in stats.get(kind, ()))
    # Not by its keywords: a folder may be called fp8. A file that could not be collected is reported by pytest itself.
    failed = [report for report in told if getattr(report, "about_fp8", False)]
    level = "error" if problems else "warning"
    undecided = [report for kind in UNANSWERED[level] for report in stats.get(kind, ())]
    return [
        *(_command("error", report, root, top) for report in failed if failures),
        *(_command(level, report, root, top) for report in undecided),
    ]


def _command(level: str, report: Any, root: Path, top: Path) -> str:
    said = dict(report.user_properties)
    crash = getattr(report.longrepr, "reprcrash", None)
    file, line, _ = report.location
    path, line = root / file, (line or 0) + 1
    if crash is not None and Path(crash.path) == path:
        line = crash.lineno
    verdict = " ".join(filter(None, (said.get("fp8_verdict", "FAIL"), said.get("fp8_code"))))
    title = f"{said.get('fp8_case', report.nodeid.rpartition('::')[2])}: {verdict}"
    message = crash.message if crash is not None else str(said.get("fp8_headline") or report.longreprtext)
    return f"::{level} file={_field(below(path, top))},line={line},title={_field(title)}::{_data(message[:LONGEST])}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _field(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
