"""What the page says of each case: a row of the table, its answers, its pictures. Plain strings for the template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_fp8.report.cells import (
    COLUMNS,
    cells_of,
    interval_of,
    known_of,
    order_of,
    slower_of,
    speedup_of,
    tally,
    verdict_of,
)
from pytest_fp8.report.footnotes import notes_of
from pytest_fp8.report.known import known_questions
from pytest_fp8.report.numbers import NONE
from pytest_fp8.report.page.drawing import Picture
from pytest_fp8.report.page.layers import LAYER_COLUMNS, layer_rows
from pytest_fp8.report.page.pictures import over_reports, pictures_of

PICTURED = 60
"""Cases with pictures on one page, those with the worst verdicts first: a case's take about a third of a second to draw
and 150 kB."""


@dataclass(frozen=True)
class Answer:
    question: str
    verdict: str
    code: str
    as_known: bool
    headline: str
    more: str
    """What was expected and seen, the cause and what to do next, and what a PASS names besides; empty where the
    headline says all."""


@dataclass(frozen=True)
class Shown:
    """One case."""

    key: str
    case: str
    gpu: str
    verdict: str
    cells: Sequence[str]
    answers: Sequence[Answer]
    errors: Sequence[str]
    """Errors of its arms."""
    known: Sequence[str]
    """Known defects that its tests failed with, as expected."""
    as_known: str
    """What fails as known, in words."""
    slower: str
    """Whether FP8 is slower than BF16 though no answer fails, in words."""
    pictures: Sequence[Picture]
    differences: Sequence[Mapping[str, Any]]
    layers: Sequence[Sequence[str]]
    in_reports: Sequence[tuple[str, str, str]]
    """In each report: verdict, what fails as known, speedup; empty for one report."""


@dataclass(frozen=True)
class Page:
    title: str
    counts: Sequence[tuple[str, bool, int]]
    """Verdict, whether it is known, number of cases."""
    reports: Sequence[str]
    """One line on the origin of each report, the oldest first."""
    cases: Sequence[Shown]
    not_run: Sequence[tuple[str, Sequence[str]]]
    unpictured: int
    layer_columns: Sequence[str] = LAYER_COLUMNS
    columns: Sequence[str] = COLUMNS


def page_of(reports: Sequence[tuple[str, Mapping[str, Any]]]) -> Page:
    """``reports``: name and content of each, the newest last; a case is shown as the newest report that has it says."""
    newest: dict[tuple[str, str], Mapping[str, Any]] = {}
    for _, report in reports:
        for name, entry in report["entries"].items():
            newest.pop((entry["gpu"], name), None)
            newest[entry["gpu"], name] = entry
    worst = sorted(newest, key=lambda which: order_of(newest[which]))
    pictured = set(worst[:PICTURED])
    cases = [_shown(f"c{index}", which, newest[which], reports, which in pictured) for index, which in enumerate(worst)]
    return Page(
        title=f"FP8 report: {len(cases)} case{'s' if len(cases) != 1 else ''}",
        counts=tally(newest.values()),
        reports=[origin_of(name, report) for name, report in reports],
        cases=cases,
        not_run=list(reports[-1][1]["not_run"].items()) if reports else [],
        unpictured=len(cases) - len(pictured),
    )


def origin_of(name: str, report: Mapping[str, Any]) -> str:
    origin = report["provenance"]
    libraries = ", ".join(f"{library} {version}" for library, version in origin["libraries"].items())
    commit = f"commit {origin['commit'] or 'unknown'}" + (" with changed files" if origin["dirty"] else "")
    partial = "a part of the suite" if report["partial"] else ""
    return "; ".join(
        filter(None, (name, origin["date"], commit, origin["gpu"]["name"], libraries, partial, origin["reason"]))
    )


def _shown(
    key: str,
    which: tuple[str, str],
    entry: Mapping[str, Any],
    reports: Sequence[tuple[str, Mapping[str, Any]]],
    drawn: bool,
) -> Shown:
    gpu, name = which
    pictures = pictures_of(entry, key) if drawn else []
    in_reports: list[tuple[str, str, str]] = []
    if len(reports) > 1:
        mine = [report["entries"].get(name) for _, report in reports]
        mine = [each if each is not None and each["gpu"] == gpu else None for each in mine]
        in_reports = [_in_report(each) if each else (NONE, NONE, NONE) for each in mine]
        rows = [(label, *interval_of(each)) for (label, _), each in zip(reports, mine, strict=True)]
        trend = over_reports(f"{key}t", name, rows) if drawn else None
        pictures += [trend] if trend is not None else []
    return Shown(
        key=key,
        case=name,
        gpu=gpu,
        verdict=verdict_of(entry),
        cells=cells_of(entry),
        answers=[_answer(question, entry) for question in entry["decisions"]],
        errors=entry["errors"],
        known=entry["expected"],
        as_known=known_of(entry),
        slower=slower_of(entry),
        pictures=pictures,
        differences=entry["evidence"].get("differences", ()),
        layers=[[_cell(cell) for cell in row] for row in layer_rows(entry)] if drawn else [],
        in_reports=in_reports,
    )


def _in_report(entry: Mapping[str, Any]) -> tuple[str, str, str]:
    return verdict_of(entry), known_of(entry), speedup_of(entry)


def _answer(question: str, entry: Mapping[str, Any]) -> Answer:
    decision = entry["decisions"][question]
    _, _, more = decision["message"].partition("\n")
    more = "\n".join(filter(None, (more, *notes_of({"": decision}))))
    known, code = question in known_questions(entry), decision.get("code") or ""
    return Answer(question, decision["verdict"], code, known, decision["headline"], more)


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)
