"""Stored baselines and their changes in words: for ``pytest-fp8 baselines`` and the closing summary."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pytest_fp8.baselines.check import Note
from pytest_fp8.baselines.metrics import EXACT, METRICS
from pytest_fp8.baselines.record import MEASUREMENT, Baseline, StoredSession
from pytest_fp8.baselines.review import Change, Revision, differing, level
from pytest_fp8.stats.estimate import estimate_of

LIST_COLUMNS = ("case", "gpu", "speedup (99 %)", "processes", "FP8 FLOPs", "memory", "loss gap", "from")
SHORT = {"transformer-engine": "te", "pytest-fp8": "", "transformers": "", "triton": ""}
"""Short names of libraries in a list; those with an empty one are only in ``show``."""


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


def aligned(rows: Iterable[Sequence[str]]) -> list[str]:
    """The rows as lines, their cells below each other."""
    whole = list(rows)
    widths = [max(map(len, column)) for column in zip(*whole, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in whole]


def _difference(change: Change) -> str:
    """The change with its interval or band."""
    if change.old is None or change.new is None or change.word == "new":
        return "-"
    if change.unit.startswith("log ratio"):
        low, high = change.change - change.half_width, change.change + change.half_width
        return f"{change.change:+.2%} [{low:+.2%}, {high:+.2%}]"
    if change.relative:
        return f"{change.change:+.2%} (band {change.half_width:.0%})"
    if change.half_width <= EXACT:
        return f"{change.change:+.6f} (exact)" if change.change else "0 (exact)"
    return f"{change.change:+.4g} (band {change.half_width:.2g})"


def revision_lines(revision: Revision) -> list[str]:
    """What an update did to one baseline; one line where nothing moved or the baseline is new."""
    name = f"baseline {revision.name}"
    if not revision.changed:
        return [f"{name}: nothing moved by more than noise; this session joins the others"]
    if revision.whole:
        values = ", ".join(f"{c.metric} {shown(c.unit, c.new)}" for c in revision.changes)
        return [f"{name} is new ({revision.whole}): {values}"]
    lines = [f"{name}, old -> new:"]
    lines += aligned(
        ("", each.metric, shown(each.unit, each.old), "->", shown(each.unit, each.new), _difference(each), each.word)
        for each in revision.changes
        if each.word != "not measured"
    )
    if revision.starts():
        lines.append(f"  a new level begins, and earlier sessions are not gated on: {', '.join(revision.starts())}")
    if revision.origins():
        lines.append("  " + "; ".join(revision.origins()))
    return lines


def print_list(baselines: Sequence[Baseline], sessions: bool = False) -> None:
    """One line per baseline, or per session of each, with the number of its origin; the origins stand below, each once,
    and behind a session's what sets it apart."""
    origins: dict[str, int] = {}
    rows: list[tuple[str, ...]] = [LIST_COLUMNS]
    for stored in baselines:
        before = None
        for session in stored.sessions if sessions else [stored.newest]:
            values = session.metrics if sessions else {name: stored.values(name) for name in stored.metrics}
            marks = _marks(before, session) if sessions else []
            text = f"{session.origin}, {libraries_of(session)}: {'; '.join([session.reason or '-', *marks])}"
            number = origins.setdefault(text, len(origins) + 1)
            speed = values.get("speedup", ())
            figures = (level_of(name, values.get(name)) for name in ("fp8_share", "memory_ratio", "loss_gap"))
            rows.append((stored.case, stored.gpu, interval_of(speed), str(len(speed) or "-"), *figures, str(number)))
            before = session
    print(*aligned(rows), sep="\n")
    for origin, number in origins.items():
        print(f"from {number}: {origin}")


def _marks(before: StoredSession | None, session: StoredSession) -> list[str]:
    """What sets a session apart from the one before it: another library or driver, a new level, another way of
    measuring."""
    found = [] if before is None else [f"since the session before: {text}" for text in differing(before, session)]
    if session.measurement != MEASUREMENT:
        found.append(f"taken another way: measurement {session.measurement}, today's is {MEASUREMENT}")
    if session.starts:
        found.append(f"a new level of {', '.join(session.starts)} begins: earlier sessions are not gated on")
    return found


def libraries_of(session: StoredSession) -> str:
    """The libraries that matter, by short names: ``torch 2.11.0, te 2.20.2``."""
    named = {SHORT.get(name, name): version for name, version in session.libraries.items()}
    return ", ".join(f"{name} {version}" for name, version in named.items() if name)


def interval_of(speedups: Sequence[Any]) -> str:
    """Stored speedups with their 99 % interval; a dash without any."""
    if not speedups:
        return "-"
    speed = estimate_of(speedups)
    return "{:.3f}x [{:.3f}, {:.3f}]".format(speed.ratio, *speed.interval)


def level_of(metric: str, values: Sequence[Any] | None) -> str:
    """A stored metric in its unit; a dash without values."""
    return shown(METRICS[metric].unit, level(metric, values)) if values else "-"


def print_diff(revisions: Sequence[Revision], removed: Sequence[str]) -> None:
    """What changed in each baseline, then those that were removed, and a closing line."""
    for revision in revisions:
        if revision.changed:
            print(*revision_lines(revision), sep="\n")
        if revision.tampered:
            print(f"{revision.name}: {revision.tampered}")
    if removed:
        print(f"{len(removed)} removed: {', '.join(removed)}")
    worse = [revision.name for revision in revisions if revision.worse] + list(removed)
    changed = sum(revision.changed for revision in revisions)
    print(
        f"{len(revisions)} baselines compared: {changed} changed, {len(revisions) - changed} as they were within noise"
        + (f"; worse: {', '.join(worse)}" if worse else "")
    )


def print_notes(found: Sequence[Note]) -> None:
    """Errors and notes, each once with the cases it is about, and the next commands."""
    grouped: dict[str, list[str]] = {}
    for note in sorted(found, key=lambda note: not note.error):
        what = f"error {note.code}" if note.error else "note"
        kind = note.code.slug.replace("-", " ")
        grouped.setdefault(f"{what}: {note.gpu}, {kind}: {note.message}", []).append(note.case)
    for text, names in grouped.items():
        print(f"{text}: {', '.join(names)}")
    for step in dict.fromkeys(note.next_step for note in found if note.error and note.next_step):
        print(f"next: {step}")
