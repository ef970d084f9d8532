"""A report as Markdown, for a pull request or a job's page."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from pytest_fp8.questions.findings import some
from pytest_fp8.report.cells import (
    COLUMNS,
    cells_of,
    is_known,
    known_of,
    known_questions,
    order_of,
    slower_of,
    tally,
    verdict_of,
)
from pytest_fp8.report.footnotes import notes_of
from pytest_fp8.report.tables import markdown_row, markdown_table

NAME = "summary.md"
EXPLAINED = 20
"""Answers with their messages; GitHub shows at most a MiB of a step's summary."""
LONGEST = 4000
"""Characters of one message."""


def markdown(report: Mapping[str, Any]) -> str:
    """The table of cases, the worst first; then what every answer that is not green expected, saw, and advises."""
    entries = sorted(report["entries"].items(), key=lambda item: order_of(item[1]))
    counts = tally(entry for _, entry in entries)
    found = [f"{count} {_words(verdict)}{' as known' if known else ''}" for verdict, known, count in counts]
    lines = [f"## FP8{', not finished' * bool(not_finished(report))}: {', '.join(found) or 'nothing ran'}", ""]
    for text in beside(report):
        lines += [f"**{_cell(text)}**", ""]
    lines += markdown_table(["case", "verdict", *COLUMNS], ()) if entries else []
    for name, entry in entries:
        verdict = "; ".join(filter(None, (_words(verdict_of(entry)), slower_of(entry), known_of(entry))))
        lines.append(markdown_row([_cell(name), verdict, *map(_cell, cells_of(entry))]))
    answers = [
        (question in known_questions(entry), name, question, decision)
        for name, entry in entries
        for question, decision in entry["decisions"].items()
        if decision["verdict"] not in ("PASS", "IMPROVED")
    ]
    # What nobody knows of first: further ones are left out.
    answers.sort(key=lambda answer: answer[0])
    for name, entry in entries:
        for text in dict.fromkeys(entry["errors"]):
            lines += _told(name, "an arm failed, as known" if is_known(entry, text) else "an arm failed", text)
    for known, name, question, decision in answers[:EXPLAINED]:
        lines += _told(name, f"{question}, as known" if known else question, decision["message"])
    if len(answers) > EXPLAINED:
        lines += ["", f"{len(answers) - EXPLAINED} more answers are in the report."]
    for name, entry in entries:
        lines += [line for note in notes_of(entry["decisions"]) for line in ("", f"{_cell(name)}: {_cell(note)}")]
    for reason, tests in report["not_run"].items():
        lines += ["", f"{len(tests)} not run: {_cell(reason)}"]
    return "\n".join(lines) + "\n"


def beside(report: Mapping[str, Any]) -> list[str]:
    """What makes a session fail, or leaves it unfinished, beside the verdicts."""
    found = [*not_finished(report), *report.get("problems", ())]
    if failed := report.get("failed_tests"):
        found.append(f"{len(failed)} test(s) failed with something else than an answer: {some(failed)}")
    return found


def not_finished(report: Mapping[str, Any]) -> list[str]:
    """That a session ended early, or has not ended, and what it left: the names of cases, some of which have no row.
    Empty for a session that came to its end."""
    left = {case: tests for case, tests in (report.get("open_tests") or {}).items() if tests}
    if left:
        count = sum(map(len, left.values()))
        what = f"{count} test(s) of {len(left)} case(s) were not run, or not to their end: {some(list(left))}"
    elif report.get("finished", True):
        return []
    else:
        what = "all FP8 tests ran, and the session was ended before its end"
    return [f"not finished: {what}"]


def _told(case: str, what: str, message: str) -> list[str]:
    text = escape(message[:LONGEST]).replace("\n\n", "\n")
    return ["", f"**{_cell(case)}**, {_cell(what)}", "", f"<pre>{text}</pre>"]


def _words(verdict: str) -> str:
    return verdict.replace("_", " ")


def _cell(text: str) -> str:
    """Text that neither ends a cell nor is taken for Markdown, HTML or a mention of somebody."""
    line = escape(" ".join(text.split()), quote=False)
    return "".join(f"&#{ord(letter)};" if letter in "|`*_[]\\@#~!" else letter for letter in line)
