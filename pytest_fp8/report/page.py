"""The page of one report or several: what the template is given, and its charts as plain SVG."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pytest_fp8.codes.pages import codes
from pytest_fp8.libraries import documentation
from pytest_fp8.report.record import Record
from pytest_fp8.report.rows import Answer, Row, number
from pytest_fp8.report.table import COLUMNS, Cell, answered, cell_of, notes_of, tally

ROLES = ("fprop", "dgrad", "wgrad", "recompute")
OPEN = ("FAIL", "ERROR", "INVALID", "UNFINISHED")
"""Verdicts of cases that are open when the page is."""
WIDTH, HEIGHT = 560, 190
"""Of a panel, in the units of its SVG."""
LEFT, RIGHT, ABOVE, BELOW = 58, 10, 8, 34
"""Room beside the axes, for tick labels of eight letters and a line below them."""
LEGEND = {
    "PASS": "what was asked is shown",
    "IMPROVED": "better than the baseline: store a new one",
    "FAIL": "the opposite is shown",
    "ERROR": "an arm failed, which ended a question",
    "INVALID": "the measurement was disturbed, or the arms differ in more than FP8: no answer",
    "INCONCLUSIVE": "the evidence does not decide: no answer",
    "NOT_EXERCISED": "there is nothing to compare with: no answer",
    "UNFINISHED": "not all tests of the case ran",
    "SLOWER": "no failure, and FP8 is slower than BF16",
}
Point = tuple[float, float]


# -- charts -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Series:
    """Points of one kind: a line, or marks. ``style`` is a class of the template's style sheet."""

    name: str
    style: str
    points: Sequence[Point]
    marks: bool = False

    def path(self, x: Callable[[float], float], y: Callable[[float], float]) -> str:
        # A mark is a line of no length with a round end.
        step = "h0M" if self.marks else "L"
        shown = (f"{x(a):.1f} {y(b):.1f}" for a, b in self.points if math.isfinite(b))
        return f"M{step.join(shown)}" + "h0" * self.marks


@dataclass(frozen=True)
class Panel:
    """A pair of axes. ``levels``: name, style and height of lines across; ``band``: heights between which is shaded."""

    x: str
    y: str
    series: Sequence[Series]
    levels: Sequence[tuple[str, str, float]] = ()
    band: tuple[str, float, float] | None = None
    form: str = "{:.4g}"
    """Of the labels beside the axis."""

    def drawn(self) -> dict[str, Any]:
        """What the template draws. Raises ``ValueError`` and ``ArithmeticError`` for numbers that no axis can show."""
        points = [point for each in self.series for point in each.points if math.isfinite(point[1])]
        heights = (
            [b for _, b in points] + [level for *_, level in self.levels] + list(self.band[1:] if self.band else ())
        )
        low, high = spread(min(heights), max(heights))
        first, last = min(a for a, _ in points), max(a for a, _ in points)
        across, up = (WIDTH - LEFT - RIGHT) / (last - first or 1), (HEIGHT - ABOVE - BELOW) / (high - low)

        def x(value: float) -> float:
            return LEFT + (value - first) * across

        def y(value: float) -> float:
            return HEIGHT - BELOW - (value - low) * up

        return {
            "x": self.x,
            "y": self.y,
            "paths": [(each.style + " marks" * each.marks, each.path(x, y)) for each in self.series if each.points],
            "levels": [(style, f"{y(level):.1f}") for _, style, level in self.levels],
            "band": (f"{y(self.band[2]):.1f}", f"{y(self.band[1]) - y(self.band[2]):.1f}") if self.band else None,
            "heights": [(f"{y(tick):.1f}", self.form.format(tick)) for tick in ticks(low, high)],
            "places": [(f"{x(tick):.1f}", f"{tick:g}") for tick in ticks(first, last) if tick == round(tick)],
            "legend": [(each.style, each.name) for each in self.series if each.points and each.name]
            + [(style, name) for name, style, _ in self.levels]
            + ([("band", self.band[0])] if self.band else []),
        }


def spread(low: float, high: float) -> Point:
    """Ends of an axis that has these heights with room around them."""
    room = 0.06 * (high - low) or abs(low) * 0.01 or 1.0
    return low - room, high + room


def ticks(low: float, high: float) -> list[float]:
    """Round numbers between the ends, four or so."""
    span = max(high - low, 1e-12)
    step = 10.0 ** math.floor(math.log10(span / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if span / (step * factor) <= 5)
    return [round(index * step, 12) for index in range(math.ceil(low / step), math.floor(high / step) + 1)]


@dataclass(frozen=True)
class Chart:
    title: str
    reads: str
    """How to read it, in one or two sentences."""
    panels: Sequence[Panel]


def curves(row: Row) -> Chart | None:
    runs = [run for run in row.evidence.curves if run.bf16 and len(run.bf16) == len(run.fp8)]
    if not runs:
        return None
    losses, gaps = [], []
    for index, run in enumerate(runs):
        bf16, fp8 = ([math.nan if loss is None else float(loss) for loss in arm] for arm in (run.bf16, run.fp8))
        losses += [
            Series("" if index else "BF16", "bf16", list(enumerate(bf16, 1))),
            Series("" if index else "FP8", "fp8", list(enumerate(fp8, 1))),
        ]
        gap = [(step, b - a) for step, (a, b) in enumerate(zip(bf16, fp8, strict=True), 1)]
        gaps.append(Series("" if index else "each seed", "fp8", gap))
    loss = row.decisions.get("loss")
    margin = number(loss.numbers, "margin") if loss else None
    band = (f"margin of the end, +-{margin:.3g}", -margin, margin) if margin is not None else None
    reads = f"{len(runs)} seed(s). Where FP8 trains as BF16 does, the lines lie on each other and the gap stays small."
    panels = Panel("", "loss", losses), Panel("training step", "FP8 - BF16", gaps, [("", "ink", 0.0)], band)
    return Chart("Loss of both arms, and the gap between them", reads, panels)


def blocks(row: Row) -> Chart | None:
    from pytest_fp8.stats.estimate import ratios_by_process

    processes = [p for p in row.timing.get("processes", ()) if len(p["bf16"]) == len(p["fp8"]) > 0]
    if not processes or not all(value > 0 for p in processes for arm in ("bf16", "fp8") for value in p[arm]):
        return None
    ratios = ratios_by_process([p["bf16"] for p in processes], [p["fp8"] for p in processes])
    series, start = [], 1
    for index, process in enumerate(ratios):
        points = [(start + place, math.exp(value)) for place, value in enumerate(process)]
        series.append(Series(f"process {index + 1}", ("fp8", "good", "bf16", "slow")[index % 4], points, marks=True))
        start += len(process)
    numbers = row.speed.numbers if row.speed else {}
    low, high, baseline = (number(numbers, name) for name in ("low", "high", "baseline"))
    levels = [("as fast as BF16", "ink", 1.0)]
    if baseline is not None and not numbers.get("on_busy"):
        levels.append((f"baseline {baseline:.3f}x", "good", baseline))
    band = ("99 % interval", low, high) if low is not None and high is not None else None
    reads = "Blocks that scatter more than the interval, or drift, say that something else ran or that clocks moved."
    if numbers.get("on_busy"):
        reads += " These are step times; the baseline is one of busy time, since an arm waits for its host."
    panel = Panel("block", "BF16 time / FP8 time", series, levels, band, form="{:.3f}x")
    return Chart("Speedup of each block of steps", reads, [panel])


def layers(row: Row) -> Chart | None:
    shown = list(enumerate(row.evidence.layers, 1))
    sqnr = [
        Series(
            role if in_fp8 else f"{role}, not FP8",
            style if in_fp8 else "faint",
            [
                (place, value)
                for place, layer in shown
                if (value := layer.sqnr_db.get(role)) is not None and (layer.ran.get(role) == "fp8") is in_fp8
            ],
            marks=True,
        )
        for role, style in zip(ROLES, ("fp8", "bf16", "good", "ink"), strict=True)
        for in_fp8 in (True, False)
    ]
    errors = [(place, 100 * each.gradient_error) for place, each in shown if each.gradient_error is not None]
    limits = [(place, 100 * each.gradient_limit) for place, each in shown if each.gradient_limit is not None]
    weights = [Series("weight's gradient off BF16's", "fp8", errors, True), Series("its limit", "bad", limits, True)]
    panels = [
        Panel("layer, in the model's order; the table below names them", label, series)
        for label, series in (("SQNR in dB", sqnr), ("%", weights))
        if any(each.points for each in series)
    ]
    reads = "A layer far below its neighbours computes something else than the recipe's casts explain."
    return Chart("Layers by role: SQNR of products, and error of gradients", reads, panels) if panels else None


def charts_of(row: Row) -> list[dict[str, Any]]:
    """Those for which the case has numbers."""
    found = []
    for draw in (curves, blocks, layers):
        # A report may be any JSON: 1e308 beside 1, or a word in place of a time.
        try:
            if chart := draw(row):
                panels = [panel.drawn() for panel in chart.panels]
                found.append({"title": chart.title, "reads": chart.reads, "panels": panels})
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            continue
    return found


# -- tables -----------------------------------------------------------------------------------------------------------


def memory_by_kind(row: Row) -> dict[str, Any] | None:
    """What is in each arm's memory at the peak of its step."""
    said = row.decisions.get("memory")
    bf16, fp8 = ((said.numbers.get(name) or {}) if said else {} for name in ("bf16_kinds", "kinds"))
    if not bf16 or not fp8:
        return None
    return {
        "title": "Memory at the peak of a step, in GiB",
        "heads": ["", "BF16", "FP8", "FP8 - BF16"],
        "rows": [[kind, f"{bf16[kind]:.2f}", f"{fp8[kind]:.2f}", f"{fp8[kind] - bf16[kind]:+.2f}"] for kind in bf16],
        "reads": "All but the cache add up to the peak that is judged. Other: held for a moment, and workspaces.",
    }


def tables_of(row: Row) -> list[dict[str, Any]]:
    """Those for which the case has numbers."""
    found = []
    for table in (memory_by_kind,):
        try:
            found.append(table(row))
        except (AttributeError, LookupError, TypeError, ValueError):
            continue
    return [each for each in found if each is not None]


# -- the page ---------------------------------------------------------------------------------------------------------


def render(reports: Sequence[tuple[str, Record]]) -> str:
    """The page of reports by name, the newest last. All text is escaped."""
    # A name may hold what no encoding can write.
    text: str = _template().render(page=page_of(reports))
    return text.encode(errors="replace").decode()


@cache
def _template() -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("page.html.j2")


def page_of(reports: Sequence[tuple[str, Record]]) -> dict[str, Any]:
    """What ``page.html.j2`` reads; a case is shown as the newest report that has it says."""
    newest: dict[tuple[str, str], Row] = {}
    for _, report in reports:
        newest |= {(row.gpu, name): row for name, row in report.entries.items()}
    cases = sorted(newest, key=lambda which: newest[which].place)
    shown, last = answered(newest.values()), reports[-1][1]
    found = {row.verdict for row in newest.values()} | {
        s.verdict for row in newest.values() for s in row.decisions.values()
    }
    found |= {"SLOWER"} if any(row.slower for row in newest.values()) else set()
    return {
        "title": f"FP8 report: {len(cases)} case{'s' if len(cases) != 1 else ''}",
        "counts": tally(newest.values()),
        "beside": [
            f"{name}: {text}" if len(reports) > 1 else text for name, report in reports for text in report.beside
        ],
        "reports": [origin_of(name, report) for name, report in reports],
        "ran": f"{last.ran} FP8 test(s) ran, {last.ran_on_gpu} of them on a GPU",
        "not_run": last.not_run,
        "waited": waited_in(last),
        "columns": [COLUMNS[question] for question in shown],
        "legend": [(verdict, text) for verdict, text in LEGEND.items() if verdict in found],
        "verdicts": documentation("verdicts.md"),
        "codes": documentation("codes.md"),
        "anchors": {str(code): f"#{code.anchor}" for code in codes()},
        "cases": [_case(f"c{place}", *which, newest[which], shown, reports) for place, which in enumerate(cases)],
    }


def origin_of(name: str, report: Record) -> str:
    origin = report.provenance
    libraries = ", ".join(f"{library} {version}" for library, version in origin.libraries.items())
    commit = f"commit {origin.commit or 'unknown'}" + (" with changed files" if origin.dirty else "")
    partial, gpu = "a part of the suite" if report.partial else "", str(origin.gpu.get("name", ""))
    return "; ".join(filter(None, (name, origin.date, commit, gpu, libraries, partial, origin.reason)))


def waited_in(report: Record) -> list[tuple[str, str, str]]:
    """Where the time went: arm, seconds, and its operations, the longest first."""
    spent = report.durations.get("waited", {})
    arms = {arm: each for arm, each in spent.items() if isinstance(each, dict)} if isinstance(spent, dict) else {}
    found = []
    for arm, operations in arms.items():
        seconds = sorted(((number(operations, what) or 0.0, what) for what in operations), reverse=True)
        told = ", ".join(f"{what} {taken:.0f}" for taken, what in seconds if taken >= 0.5)
        found.append((sum(taken for taken, _ in seconds), arm, told))
    return [(arm, f"{total:.0f} s", told) for total, arm, told in sorted(found, reverse=True)]


def _case(
    key: str, gpu: str, name: str, row: Row, shown: Sequence[str], reports: Sequence[tuple[str, Record]]
) -> dict[str, Any]:
    cells = [cell_of(row, question) for question in shown]
    return {
        "key": key,
        "case": name,
        "gpu": gpu,
        "row": row,
        "open": len(reports[-1][1].entries) <= 3 or (row.verdict in OPEN and not row.all_known) or bool(row.slower),
        "style": "SLOWER" if row.slower and row.verdict in ("PASS", "IMPROVED", "NOT_EXERCISED") else row.verdict,
        "cells": cells,
        "answers": [_answer(question, said, row.knows(question)) for question, said in row.decisions.items()],
        "notes": notes_of(row),
        "charts": charts_of(row),
        "tables": tables_of(row),
        "layers": [_layer(each) for each in row.evidence.layers],
        "roles": ROLES,
        "in_reports": [_within(report.entries.get(name), gpu) for _, report in reports] if len(reports) > 1 else [],
    }


def _answer(question: str, said: Answer, known: bool = False) -> dict[str, Any]:
    """``more``: what was expected and seen, the cause and what to do next."""
    return {
        "question": question,
        "verdict": said.verdict,
        "code": said.code or "",
        "known": known,
        "headline": said.headline,
        "more": said.message.partition("\n")[2].splitlines(),
        "numbers": json.dumps(said.numbers, indent=1) if said.numbers else "",
    }


def _layer(each: Any) -> list[str]:
    """A row of the table of layers: per role what ran, and its SQNR beside that of the recipe's own casts."""
    cells = [each.layer]
    for role in ROLES:
        sqnr, own = (
            f"{value:.3g}" if value is not None else ""
            for value in (each.sqnr_db.get(role), each.own_sqnr_db.get(role))
        )
        cells.append(" ".join(filter(None, (each.ran.get(role, ""), sqnr and f"{sqnr} dB", own and f"({own})"))))
    error, limit = (f"{value:.3g}" if value is not None else "" for value in (each.gradient_error, each.gradient_limit))
    return [*cells, error + (f" (<{limit})" if limit else ""), each.skipped]


def _within(row: Row | None, gpu: str) -> tuple[str, Cell] | None:
    """A case in one of several reports: its verdict and speedup."""
    return (row.verdict, cell_of(row, "speedup")) if row is not None and row.gpu == gpu else None
