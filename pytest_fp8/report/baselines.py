"""Stored baselines in words: the lines and cells of ``pytest-fp8 baselines``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

from pytest_fp8.baselines.check import Finding
from pytest_fp8.baselines.review import Revision, level
from pytest_fp8.baselines.store import Baseline
from pytest_fp8.report.revisions import STYLE, change_cells, revision_lines, shown
from pytest_fp8.rules.change import speed_of

LIST_COLUMNS = ("case", "gpu", "speedup (99 %)", "processes", "FP8 FLOPs", "memory", "loss gap", "from")
SHORT = {"transformer-engine": "te", "pytest-fp8": "", "transformers": "", "triton": ""}
"""Short names of libraries in a list; those with an empty one are only in ``show``."""
PROVENANCE = ("date", "commit", "dirty", "reason", "unfit")


def describe(baseline: Baseline) -> dict[str, Any]:
    """The facts of one line as data: ratios, share and nats as numbers."""
    facts: dict[str, Any] = {"case": baseline.case, "gpu": baseline.gpu, "case_hash": baseline.case_hash}
    facts |= {name: level(name, metric) for name, metric in baseline.metrics.items()}
    if "speedup" in baseline.metrics:
        speed = speed_of(baseline.values("speedup"))
        facts |= {"speedup": speed.ratio, "speedup_interval": speed.interval, "processes": len(speed.each)}
    return {**facts, **{name: baseline.provenance[name] for name in ("date", "commit", "reason", "libraries")}}


def print_list(baselines: Sequence[Baseline]) -> None:
    """One line per baseline, with the number of its origin; the origins stand below, each once."""
    from pytest_fp8.report.tables import table

    origins: dict[str, int] = {}
    rows = [[*_cells(stored), str(origins.setdefault(_origin(stored), len(origins) + 1))] for stored in baselines]
    table(LIST_COLUMNS, rows)
    for origin, number in origins.items():
        print(f"from {number}: {origin}")


def _cells(baseline: Baseline) -> list[str]:
    facts = describe(baseline)
    low, high = facts.get("speedup_interval", (0.0, 0.0))
    return [
        baseline.case,
        baseline.gpu,
        f"{facts['speedup']:.3f}x [{low:.3f}, {high:.3f}]" if "processes" in facts else "-",
        str(facts.get("processes", "-")),
        *(shown_or_dash(baseline, metric) for metric in ("fp8_share", "memory_ratio", "loss_gap")),
    ]


def _origin(baseline: Baseline) -> str:
    facts = baseline.provenance
    named = {SHORT.get(name, name): version for name, version in facts["libraries"].items()}
    libraries = ", ".join(f"{name} {version}" for name, version in named.items() if name)
    return f"{facts['date']}, commit {facts['commit'] or 'unknown'}, {libraries}: {facts['reason'] or '-'}"


def shown_or_dash(baseline: Baseline, metric: str) -> str:
    stored = baseline.metrics.get(metric)
    return shown(str(stored["unit"]), level(metric, stored)) if stored is not None else "-"


def show_lines(baseline: Baseline) -> list[str]:
    """Everything in one baseline: values per process or seed, tolerances, where they came from."""
    lines = [f"{baseline.case} on {baseline.gpu} (case hash {baseline.case_hash})"]
    for name, metric in sorted(baseline.metrics.items()):
        unit = str(metric["unit"])
        value = shown(unit, level(name, metric))
        if name == "speedup":
            low, high = speed_of(metric["values"]).interval
            value += f" [{low:.3f}, {high:.3f}] (99 %)"
        lines.append(f"  {name}: {value}")
        lines.append(f"    {unit}; {metric['direction']}; tolerance {metric['tolerance']:g}")
        lines += [f"    {text}" for text in _values(unit, metric["values"])]
    provenance = baseline.provenance
    lines.append("  from")
    lines += [f"    {name}: {provenance[name]}" for name in PROVENANCE if provenance.get(name) not in (None, "")]
    for part in ("gpu", "libraries"):
        facts = provenance[part]
        if facts:
            lines.append(f"    {part}: {', '.join(f'{key} {value}' for key, value in facts.items())}")
    for name, origin in provenance.get("kept", {}).items():
        lines.append(f"    {name} kept from {origin['date']}, commit {origin['commit']}")
    return lines


def _values(unit: str, values: Sequence[Any]) -> list[str]:
    if isinstance(values[0], list):
        return [
            f"process {index + 1}: {math.exp(median(blocks)):.4f}x; blocks "
            + " ".join(f"{math.exp(value):.4f}" for value in blocks)
            for index, blocks in enumerate(values)
        ]
    return ["values: " + ", ".join(shown(unit, value) for value in values)]


def revision_to_json(revision: Revision) -> dict[str, Any]:
    return {
        "case": revision.case,
        "gpu": revision.gpu,
        "not compared": revision.whole,
        "origins": revision.origins(),
        "worse": revision.worse,
        "changes": [dict(vars(change)) for change in revision.changes],
    }


def print_diff(revisions: Sequence[Revision], only_old: Sequence[str]) -> None:
    """One table of all metrics that differ, then new, unfit and missing baselines, and a closing line."""
    from pytest_fp8.report.tables import table

    rows: list[tuple[str, ...]] = []
    styles: list[str] = []
    for revision in revisions:
        name = f"{revision.gpu}/{revision.case}"
        for change in () if revision.whole else revision.changes:
            if change.word in ("same", "not measured"):
                continue
            rows.append((name, *change_cells(change)))
            styles.append(STYLE.get(change.word, "dim"))
    if rows:
        table(("baseline", "metric", "old", "new", "change", "finding"), rows, styles)
    for revision in revisions:
        name = f"{revision.gpu}/{revision.case}"
        if revision.whole:
            print(revision_lines(revision)[0])
        if "unfit" in revision.new_provenance:
            print(f"{name}: not fit to be stored: {revision.new_provenance['unfit']}")
    for text in dict.fromkeys(line for revision in revisions for line in revision.origins()):
        print(f"measured with {text}")
    if only_old:
        print(f"{len(only_old)} only in A: {', '.join(only_old)}")
    worse = [f"{r.gpu}/{r.case}" for r in revisions if r.worse]
    changed = sum(revision.rewrites for revision in revisions)
    print(
        f"{len(revisions)} baselines compared: {changed} changed, {len(revisions) - changed} as they were within noise"
        + (f"; worse: {', '.join(worse)}" if worse else "")
    )


def print_findings(errors: Sequence[Finding], notes: Sequence[Finding]) -> None:
    """Errors as a table, with the next commands; each note once, with the cases it is about."""
    from pytest_fp8.report.tables import table

    if errors:
        table(
            ("baseline", "error", ""), [(f"{f.gpu}/{f.case}", f.kind, f.message) for f in errors], ["red"] * len(errors)
        )
    for step in dict.fromkeys(finding.next_step for finding in errors if finding.next_step):
        print(f"next: {step}")
    grouped: dict[str, list[str]] = {}
    for note in notes:
        grouped.setdefault(f"{note.gpu}, {note.kind}: {note.message}", []).append(note.case)
    for text, names in grouped.items():
        print(f"note: {text}: {', '.join(names)}")
