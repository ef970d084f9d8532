"""A report as Markdown, for a pull request or a job's page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from html import escape
from typing import Any

from pytest_fp8.report.cells import COLUMNS, VERDICTS, cells_of, verdict_of
from pytest_fp8.report.footnotes import notes_of

NAME = "summary.md"
EXPLAINED = 20
"""Answers with their messages; GitHub shows at most a MiB of a step's summary."""
LONGEST = 4000
"""Characters of one message."""


def markdown(report: Mapping[str, Any]) -> str:
    """The table of cases, the worst first; then what every answer that is not green expected, saw, and advises."""
    entries = sorted(report["entries"].items(), key=lambda item: VERDICTS.index(verdict_of(item[1])))
    counts = Counter(verdict_of(entry) for _, entry in entries)
    lines = [
        f"## FP8: {', '.join(f'{counts[verdict]} {_words(verdict)}' for verdict in VERDICTS if counts[verdict])}",
        "",
    ]
    lines += [_row(["case", "verdict", *COLUMNS]), _row(["---"] * (2 + len(COLUMNS)))]
    for name, entry in entries:
        known = " (as known)" if entry["expected"] else ""
        lines.append(_row([_cell(name), _words(verdict_of(entry)) + known, *map(_cell, cells_of(entry))]))
    found = [
        (name, question, decision)
        for name, entry in entries
        for question, decision in entry["decisions"].items()
        if decision["verdict"] not in ("PASS", "IMPROVED")
    ]
    for name, entry in entries:
        lines += [line for text in entry["errors"] for line in _told(name, "an arm failed", text)]
    for name, question, decision in found[:EXPLAINED]:
        lines += _told(name, question, decision["message"])
    if len(found) > EXPLAINED:
        lines += ["", f"{len(found) - EXPLAINED} more answers are in the report."]
    for name, entry in entries:
        lines += [line for note in notes_of(entry["decisions"]) for line in ("", f"{_cell(name)}: {_cell(note)}")]
    for reason, tests in report["not_run"].items():
        lines += ["", f"{len(tests)} not run: {_cell(reason)}"]
    return "\n".join(lines) + "\n"


def _told(case: str, what: str, message: str) -> list[str]:
    text = escape(message[:LONGEST]).replace("\n\n", "\n")
    return ["", f"**{_cell(case)}**, {_cell(what)}", "", f"<pre>{text}</pre>"]


def _words(verdict: str) -> str:
    return verdict.replace("_", " ")


def _cell(text: str) -> str:
    """Text that neither ends a cell nor is taken for Markdown, HTML or a mention of somebody."""
    line = escape(" ".join(text.split()), quote=False)
    return "".join(f"&#{ord(letter)};" if letter in "|`*_[]\\@#~!" else letter for letter in line)


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
