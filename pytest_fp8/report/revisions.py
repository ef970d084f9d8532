"""The changes of a baseline, old -> new, as cells and lines: for the closing summary and the command line."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_fp8.baselines.review import Change, Revision

STYLE = {"worse": "red", "removed": "red", "better": "green", "moved": "yellow", "new": "cyan"}


def shown(unit: str, value: float | None) -> str:
    """A metric's value as people write it: ``1.118x``, ``119.86 ms``, ``78.74%``, ``+0.0047``."""
    if value is None:
        return "-"
    if unit.startswith("log ratio") or " over " in unit:
        return f"{value:.3f}x"
    if unit.startswith("ms"):
        return f"{value:.2f} ms"
    if unit.startswith("share"):
        return f"{value:.2%}"
    if unit == "nats":
        return f"{value:+.4f}"
    return f"{value:g}"


def change_cells(change: Change) -> tuple[str, str, str, str, str]:
    """(metric, old, new, change with its interval or band, finding)."""
    return (
        change.metric,
        shown(change.unit, change.old),
        shown(change.unit, change.new),
        _difference(change),
        change.word,
    )


def _difference(change: Change) -> str:
    if change.old is None or change.new is None or change.word == "new":
        return "-"
    if change.unit.startswith("log ratio"):
        low, high = change.change - change.half_width, change.change + change.half_width
        return f"{change.change:+.2%} [{low:+.2%}, {high:+.2%}]"
    if change.relative:
        return f"{change.change:+.2%} (band {change.half_width:.0%})"
    if change.half_width <= 1e-9:
        return f"{change.change:+.6f} (exact)" if change.change else "0 (exact)"
    if change.half_width < 0.001:
        return f"{change.change:+.2g} (band {change.half_width:.2g})"
    return f"{change.change:+.4f} (band {change.half_width:.3f})"


def revision_lines(revision: Revision) -> list[str]:
    """What an update did to one baseline; one line where nothing moved or the baseline is new."""
    name = f"baseline {revision.gpu}/{revision.case}"
    if not revision.changed:
        return [f"{name}: nothing moved by more than noise; this session joins the others"]
    if revision.whole:
        values = ", ".join(f"{c.metric} {shown(c.unit, c.new)}" for c in revision.changes)
        return [f"{name} is new ({revision.whole}): {values}"]
    lines = [f"{name}, old -> new:"]
    rows = [change_cells(change) for change in revision.changes if change.word != "not measured"]
    lines += [
        f"  {metric:<{widths[0]}}  {old:>{widths[1]}} -> {new:<{widths[2]}}  {difference:<{widths[3]}}  {word}"
        for widths in [_widths(rows)]
        for metric, old, new, difference, word in rows
    ]
    if revision.starts():
        lines.append(f"  a new level begins, and earlier sessions are not gated on: {', '.join(revision.starts())}")
    if revision.origins():
        lines.append("  " + "; ".join(revision.origins()))
    return lines


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
