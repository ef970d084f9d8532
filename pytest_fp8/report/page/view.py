"""What the page says of each case: a row of the table, its answers, its pictures. Plain data for the template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pytest_fp8.report.cells import (
    COLUMNS,
    NONE,
    cells_of,
    interval_of,
    known_of,
    known_questions,
    order_of,
    slower_of,
    speedup_of,
    tally,
    verdict_of,
)
from pytest_fp8.report.footnotes import notes_of
from pytest_fp8.report.page.pictures import LAYER_COLUMNS, layer_rows, over_reports, pictures_of
from pytest_fp8.report.summary import beside

PICTURED = 60
"""Cases with pictures on one page, those with the worst verdicts first: a case's take about a third of a second to draw
and 150 kB."""
Reports = Sequence[tuple[str, Mapping[str, Any]]]
"""Name and content of each, the newest last."""


def page_of(reports: Reports) -> dict[str, Any]:
    """What ``page.html.j2`` reads; a case is shown as the newest report that has it says."""
    newest: dict[tuple[str, str], Mapping[str, Any]] = {}
    for _, report in reports:
        for name, entry in report["entries"].items():
            newest.pop((entry["gpu"], name), None)
            newest[entry["gpu"], name] = entry
    worst = sorted(newest, key=lambda which: order_of(newest[which]))
    drawn = worst[:PICTURED]
    return {
        "title": f"FP8 report: {len(worst)} case{'s' if len(worst) != 1 else ''}",
        "counts": tally(newest.values()),
        "beside": [
            f"{name}: {text}" if len(reports) > 1 else text for name, report in reports for text in beside(report)
        ],
        "reports": [origin_of(name, report) for name, report in reports],
        "cases": [
            _case(f"c{index}", *which, newest[which], reports, which in drawn) for index, which in enumerate(worst)
        ],
        "not_run": list(reports[-1][1]["not_run"].items()) if reports else [],
        "unpictured": len(worst) - len(drawn),
        "layer_columns": LAYER_COLUMNS,
        "columns": list(COLUMNS),
    }


def origin_of(name: str, report: Mapping[str, Any]) -> str:
    origin = report["provenance"]
    libraries = ", ".join(f"{library} {version}" for library, version in origin["libraries"].items())
    commit = f"commit {origin['commit'] or 'unknown'}" + (" with changed files" if origin["dirty"] else "")
    partial = "a part of the suite" if report["partial"] else ""
    parts = (name, origin["date"], commit, origin["gpu"]["name"], libraries, partial, origin["reason"])
    return "; ".join(filter(None, parts))


def _case(key: str, gpu: str, name: str, entry: Mapping[str, Any], reports: Reports, drawn: bool) -> dict[str, Any]:
    pictures = pictures_of(entry, key) if drawn else []
    in_reports: list[tuple[str, str, str]] = []
    if len(reports) > 1:
        found = [report["entries"].get(name) for _, report in reports]
        mine = [each if each is not None and each["gpu"] == gpu else None for each in found]
        in_reports = [(verdict_of(e), known_of(e), speedup_of(e)) if e else (NONE, NONE, NONE) for e in mine]
        rows = [(label, *interval_of(each)) for (label, _), each in zip(reports, mine, strict=True)]
        pictures += filter(None, [over_reports(f"{key}t", name, rows)] if drawn else [])
    return {
        "key": key,
        "case": name,
        "gpu": gpu,
        "verdict": verdict_of(entry),
        "cells": cells_of(entry),
        "answers": [_answer(question, entry) for question in entry["decisions"]],
        "errors": entry["errors"],
        "known": entry["expected"],
        "as_known": known_of(entry),
        "slower": slower_of(entry),
        "pictures": pictures,
        "differences": entry["evidence"].get("differences", ()),
        "layers": [list(map(_cell, row)) for row in layer_rows(entry)] if drawn else [],
        "in_reports": in_reports,
    }


def _answer(question: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    """``more``: what was expected and seen, the cause and what to do next, and what a PASS names besides."""
    decision = entry["decisions"][question]
    more = "\n".join(filter(None, (decision["message"].partition("\n")[2], *notes_of({"": decision}))))
    code, known = decision.get("code") or "", question in known_questions(entry)
    said = {name: decision[name] for name in ("verdict", "headline")}
    return {"question": question, "code": code, "as_known": known, "more": more, **said}


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)
