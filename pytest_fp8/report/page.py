"""The page of a session: what the template is given, and its charts as plain SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from pytest_fp8.codes.pages import codes
from pytest_fp8.libraries import documentation
from pytest_fp8.recipes import RECOMPUTE, ROLES
from pytest_fp8.report.record import Record
from pytest_fp8.report.rows import Row, number
from pytest_fp8.report.table import BAD, COLUMNS, answered, cell_of, notes_of, tally

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


# -- charts -----------------------------------------------------------------------------------------------------------


class Series(NamedTuple):
    """Points of one kind: a line, or marks. ``style`` is a class of the template's style sheet."""

    name: str
    style: str
    points: Sequence[tuple[float, float]]
    marks: bool = False


def panel(
    x: str,
    y: str,
    series: Sequence[Series],
    levels: Sequence[tuple[str, str, float]] = (),
    band: tuple[str, float, float] | None = None,
    form: str = "{:.4g}",
) -> dict[str, Any]:
    """A pair of axes, drawn. ``levels``: name, style and height of lines across; ``band``: heights between which is
    shaded; ``form``: of the labels beside the axis. Raises ``ValueError`` and ``ArithmeticError`` for numbers that no
    axis can show."""
    points = [point for each in series for point in each.points if math.isfinite(point[1])]
    heights = [b for _, b in points] + [level for *_, level in levels] + list(band[1:] if band else ())
    room = 0.06 * (max(heights) - min(heights)) or abs(heights[0]) * 0.01 or 1.0
    low, high = min(heights) - room, max(heights) + room
    first, last = min(a for a, _ in points), max(a for a, _ in points)
    across, up = (WIDTH - LEFT - RIGHT) / (last - first or 1), (HEIGHT - ABOVE - BELOW) / (high - low)

    def right(value: float) -> str:
        return f"{LEFT + (value - first) * across:.1f}"

    def down(value: float) -> str:
        return f"{HEIGHT - BELOW - (value - low) * up:.1f}"

    def path(each: Series) -> str:
        # A mark is a line of no length with a round end.
        step = "h0M" if each.marks else "L"
        return f"M{step.join(f'{right(a)} {down(b)}' for a, b in each.points if math.isfinite(b))}" + "h0" * each.marks

    return {
        "x": x,
        "y": y,
        "paths": [(each.style + " marks" * each.marks, path(each)) for each in series],
        "levels": [(style, down(level)) for _, style, level in levels],
        "band": (down(band[2]), f"{(band[2] - band[1]) * up:.1f}") if band else None,
        "heights": [(down(tick), form.format(tick)) for tick in ticks(low, high)],
        "places": [(right(tick), f"{tick:g}") for tick in ticks(first, last) if tick == round(tick)],
        "legend": [(each.style, each.name) for each in series if each.name]
        + [(style, name) for name, style, _ in levels]
        + ([("band", band[0])] if band else []),
    }


def ticks(low: float, high: float) -> list[float]:
    """Round numbers between the ends, four or so."""
    span = max(high - low, 1e-12)
    step = 10.0 ** math.floor(math.log10(span / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if span / (step * factor) <= 5)
    return [round(index * step, 12) for index in range(math.ceil(low / step), math.floor(high / step) + 1)]


def curves(row: Row) -> dict[str, Any]:
    losses, gaps = [], []
    for index, run in enumerate(row.evidence.curves):
        arms = [
            (math.nan if a is None else a, math.nan if b is None else b) for a, b in zip(run.bf16, run.fp8, strict=True)
        ]
        for place, (name, style) in enumerate((("BF16", "bf16"), ("FP8", "fp8"))):
            losses.append(Series("" if index else name, style, [(at, both[place]) for at, both in enumerate(arms, 1)]))
        gap = [(step, fp8 - bf16) for step, (bf16, fp8) in enumerate(arms, 1)]
        gaps.append(Series("" if index else "each seed", "fp8", gap))
    loss = row.decisions.get("loss")
    margin = number(loss.numbers, "margin") if loss else None
    band = (f"margin of the end, +-{margin:.3g}", -margin, margin) if margin is not None else None
    return {
        "title": "Loss of both arms, and the gap between them",
        "reads": f"{len(gaps)} seed(s). Where FP8 trains as BF16 does, the lines lie on each other, the gap is small.",
        "panels": [panel("", "loss", losses), panel("training step", "FP8 - BF16", gaps, [("", "ink", 0.0)], band)],
    }


def blocks(row: Row) -> dict[str, Any]:
    from pytest_fp8.stats.estimate import ratios_by_process

    processes = row.timing["processes"]
    ratios = ratios_by_process([p["bf16"] for p in processes], [p["fp8"] for p in processes])
    series, start = [], 1
    for index, process in enumerate(ratios):
        points = [(start + place, math.exp(value)) for place, value in enumerate(process)]
        series.append(Series(f"process {index + 1}", ("fp8", "good", "bf16", "slow")[index % 4], points, marks=True))
        start += len(process)
    numbers = row.speed.numbers if row.speed else {}
    low, high, baseline = (number(numbers, name) for name in ("low", "high", "baseline"))
    levels = [("as fast as BF16", "ink", 1.0)]
    reads = "Blocks that scatter more than the interval, or drift, say that something else ran or that clocks moved."
    if numbers.get("on_busy"):
        reads += " These are step times; the baseline is one of busy time, since an arm waits for its host."
    elif baseline is not None:
        levels.append((f"baseline {baseline:.3f}x", "good", baseline))
    band = ("99 % interval", low, high) if low is not None and high is not None else None
    panels = [panel("block", "BF16 time / FP8 time", series, levels, band, form="{:.3f}x")]
    return {"title": "Speedup of each block of steps", "reads": reads, "panels": panels}


def memory_by_kind(row: Row) -> dict[str, Any]:
    """What is in each arm's memory at the peak of its step."""
    numbers = row.decisions["memory"].numbers
    bf16, fp8 = numbers["bf16_kinds"], numbers["kinds"]
    return {
        "title": "Memory at the peak of a step, in GiB",
        "heads": ["", "BF16", "FP8", "FP8 - BF16"],
        "rows": [[kind, f"{bf16[kind]:.2f}", f"{fp8[kind]:.2f}", f"{fp8[kind] - bf16[kind]:+.2f}"] for kind in bf16],
        "reads": "All but the cache add up to the peak that is judged. Other: held for a moment, and workspaces.",
    }


def drawn(row: Row, *figures: Any) -> list[dict[str, Any]]:
    """Those for which the case has numbers."""
    found = []
    for figure in figures:
        # A report may be any JSON: 1e308 beside 1, or a word in place of a time.
        try:
            found.append(figure(row))
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            continue
    return found


# -- the page ---------------------------------------------------------------------------------------------------------


def render(name: str, report: Record) -> str:
    """The page of a report. All text is escaped."""
    # A name may hold what no encoding can write.
    text: str = _template().render(page=page_of(name, report))
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


def page_of(name: str, report: Record) -> dict[str, Any]:
    """What ``page.html.j2`` reads beside the record itself."""
    rows = sorted(report.entries.values(), key=lambda row: row.place)
    shown = answered(rows)
    found = {word for row in rows for word in (row.verdict, *(said.verdict for said in row.decisions.values()))}
    found |= {"SLOWER"} if any(row.slower for row in rows) else set()
    return {
        "title": f"FP8 report: {len(rows)} case{'s' if len(rows) != 1 else ''}",
        "report": report,
        "counts": tally(rows),
        "origin": origin_of(name, report),
        "waited": waited_in(report),
        "columns": [COLUMNS[question] for question in shown],
        "legend": [(verdict, text) for verdict, text in LEGEND.items() if verdict in found],
        "named": BAD,
        "verdicts": documentation("verdicts.md"),
        "codes": documentation("codes.md"),
        "anchors": {str(code): f"#{code.anchor}" for code in codes()},
        "cases": [
            {
                "row": row,
                "open": len(rows) <= 3 or (row.verdict in OPEN and not row.all_known) or bool(row.slower),
                "style": "SLOWER"
                if row.slower and row.verdict in ("PASS", "IMPROVED", "NOT_EXERCISED")
                else row.verdict,
                "cells": [cell_of(row, question) for question in shown],
                "notes": notes_of(row),
                "charts": drawn(row, curves, blocks),
                "tables": drawn(row, memory_by_kind),
                "layers": layers_in(row),
            }
            for row in rows
        ],
    }


def origin_of(name: str, report: Record) -> str:
    origin = report.provenance
    libraries = ", ".join(f"{library} {version}" for library, version in origin.libraries.items())
    commit = f"commit {origin.commit or 'unknown'}" + (" with changed files" if origin.dirty else "")
    partial, gpu = "a part of the suite" if report.partial else "", str(origin.gpu.get("name", ""))
    return "; ".join(filter(None, (name, origin.date, commit, gpu, libraries, partial, origin.reason)))


def waited_in(report: Record) -> list[tuple[str, str, str]]:
    """Where the time went: arm, seconds, and its operations, the longest first."""
    waited = report.durations.get("waited", {})
    rows = sorted(waited.items(), key=lambda item: -sum(item[1].values()))
    return [
        (
            arm,
            f"{sum(spent.values()):.0f} s",
            ", ".join(f"{what} {s:.0f}" for what, s in spent.most_common() if s >= 0.5),
        )
        for arm, spent in rows
    ]


def layers_in(row: Row) -> list[list[str]]:
    """The table of layers, its heads first: a column for each thing that is known of one; empty without layers."""
    layers = row.evidence.layers
    heads = dict.fromkeys((*ROLES, RECOMPUTE)) | dict.fromkeys(c for cells in layers.values() for c in cells)
    columns = [head for head in heads if any(head in cells for cells in layers.values())]
    table = [[name, *(cells.get(column, "") for column in columns)] for name, cells in layers.items()]
    return [["layer", *columns], *table] if layers else []
