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
from pytest_fp8.report.table import BAD, COLUMNS, LOOKS, answered, cell_of, notes_of, tally

OPEN = ("FAIL", "ERROR", "INVALID", "UNFINISHED")
"""Verdicts of cases that are open when the page is."""


# -- charts -----------------------------------------------------------------------------------------------------------


class Series(NamedTuple):
    """Points of one kind, drawn as a line or as marks. ``style``: classes of the template's style sheet."""

    name: str
    style: str
    points: Sequence[tuple[float, float]]

    @property
    def path(self) -> str:
        # A mark is a line of no length with a round end.
        marks = "marks" in self.style
        points = [f"{a:.7g} {-b:.7g}" for a, b in self.points if math.isfinite(b)]
        return f"M{('h0M' if marks else 'L').join(points)}" + "h0" * marks


def panel(
    x: str,
    y: str,
    series: Sequence[Series],
    levels: Sequence[tuple[str, str, float]] = (),
    band: tuple[str, float, float] | None = None,
    form: str = "{:.4g}",
) -> dict[str, Any]:
    """A pair of axes as paths in the units of its figures, which SVG stretches. ``levels``: name, style and height of
    lines across; ``band``: heights between which is shaded; ``form``: of the ends of the axis. Raises ``ValueError``
    where there is nothing to show."""
    points = [point for each in series for point in each.points if math.isfinite(point[1])]
    heights = [b for _, b in points] + [level for *_, level in levels] + list(band[1:] if band else ())
    low, high, first, last = min(heights), max(heights), min(points)[0], max(points)[0]
    paths = [(each.style, each.path) for each in series]
    paths += [(f"{style} level", f"M{first} {-level:.7g}H{last}") for _, style, level in levels]
    named = [(each.style, each.name) for each in series] + [(style, name) for name, style, _ in levels]
    if band:
        paths.insert(0, ("band", f"M{first} {-band[1]:.7g}H{last}V{-band[2]:.7g}H{first}Z"))
        named.append(("band", band[0]))
    box = f"{first} {-high:.7g} {last - first or 1} {high - low or 1:.7g}"
    ends = {"first": first, "last": last, "low": form.format(low), "high": form.format(high)}
    return {"x": x, "y": y, "box": box, "paths": paths, "legend": named, **ends}


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
        style = ("fp8", "good", "bf16", "slow")[index % 4]
        series.append(Series(f"process {index + 1}", f"{style} marks", points))
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
    return {
        "title": f"FP8 report: {len(rows)} case{'s' if len(rows) != 1 else ''}",
        "report": report,
        "counts": tally(rows),
        "origin": origin_of(name, report),
        "columns": [COLUMNS[question] for question in shown],
        "legend": {verdict: text for verdict, (_, _, text) in LOOKS.items()},
        "named": BAD,
        "verdicts": documentation("verdicts.md"),
        "codes": documentation("codes.md"),
        "anchors": {str(code): f"#{code.anchor}" for code in codes()},
        "cases": [
            {
                "row": row,
                "open": len(rows) <= 3 or row.verdict in OPEN or bool(row.slower),
                "style": "SLOWER" if row.slower and row.verdict not in BAD else row.verdict,
                "cells": [cell_of(row, question) for question in shown],
                "notes": notes_of(row),
                "charts": drawn(row, curves, blocks),
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


def layers_in(row: Row) -> list[list[str]]:
    """The table of layers, its heads first: a column for each thing that is known of one; empty without layers."""
    layers = row.evidence.layers
    heads = dict.fromkeys((*ROLES, RECOMPUTE)) | dict.fromkeys(c for cells in layers.values() for c in cells)
    columns = [head for head in heads if any(head in cells for cells in layers.values())]
    table = [[name, *(cells.get(column, "") for column in columns)] for name, cells in layers.items()]
    return [["layer", *columns], *table] if layers else []
