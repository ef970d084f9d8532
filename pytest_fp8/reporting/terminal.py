"""The closing summary: one row per case, what did not run, where the time went."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from pytest_fp8.reporting.ledger import Entry, Ledger

_STYLE = {"PASS": "green", "FAIL": "red", "INCONCLUSIVE": "yellow", "INVALID": "yellow", "NOT_EXERCISED": "dim"}
TESTS_SHOWN = 3


def summary(ledger: Ledger, width: int, color: bool) -> str:
    """The table of cases, drawn by rich; empty where no case was asked anything."""
    if not ledger.entries:
        return ""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for column in ("case", "FP8\nlayers", "FP8\nFLOPs", "loss gap\nnats", "speedup [interval]\n/ baseline", "memory", "switch\nback"):
        table.add_column(column, overflow="fold")
    for entry in ledger.entries.values():
        table.add_row(entry.case, *row(entry))
    console = Console(file=io.StringIO(), width=max(100, width), force_terminal=color, no_color=not color, highlight=False)
    console.print(table)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines())


def row(entry: Entry) -> list[str]:
    """The cells of one case; a question that was not asked is a dash."""
    decisions = entry.decisions
    cells = []
    layers = decisions.get("layers", {}).get("numbers", {})
    cells.append(_cell(decisions.get("layers"), f"{layers.get('converted', '?')}/{layers.get('linears', '?')}"))
    cells.append(_cell(decisions.get("layers"), f"{layers.get('fp8_share', 0):.1%}"))
    loss = decisions.get("loss", {}).get("numbers", {})
    text = f"{loss['gap']:+.4f} (<{loss['margin']:.3f})" if "gap" in loss else _word(decisions.get("loss"))
    cells.append(_cell(decisions.get("loss"), text))
    speed = decisions.get("speedup") or decisions.get("faster")
    numbers = (speed or {}).get("numbers", {})
    text = ""
    if "speedup" in numbers:
        stored = f"{numbers['baseline']:.3f}" if numbers.get("baseline") else "none"
        text = f"{numbers['speedup']:.3f}x [{numbers['low']:.3f}, {numbers['high']:.3f}] / {stored}"
    faster = decisions.get("faster")
    if faster is not None and faster["verdict"] == "FAIL":
        text += " slower than BF16"
    cells.append(_cell(speed, text or _word(speed)))
    memory = decisions.get("memory", {}).get("numbers", {})
    cells.append(_cell(decisions.get("memory"), f"{memory['ratio']:.2f}x" if "ratio" in memory else _word(decisions.get("memory"))))
    cells.append(_cell(decisions.get("checkpoints"), _word(decisions.get("checkpoints")).lower()))
    if entry.errors:
        cells[-1] = f"[red]error: {_escape(entry.errors[0][:60])}[/red]"
    return cells


def _cell(decision: Mapping[str, Any] | None, text: str) -> str:
    if decision is None:
        return "[dim]-[/dim]"
    verdict = decision["verdict"]
    mark = "" if verdict == "PASS" else f" {verdict}" if verdict not in text.upper() else ""
    return f"[{_STYLE[verdict]}]{_escape(text + mark)}[/]"


def _word(decision: Mapping[str, Any] | None) -> str:
    return str(decision["verdict"]) if decision is not None else "-"


def _escape(text: str) -> str:
    return text.replace("[", "\\[")


def findings(ledger: Ledger) -> list[str]:
    """The messages of INCONCLUSIVE, INVALID and NOT_EXERCISED decisions: tests that passed, and should not be taken
    for more than they are."""
    lines = []
    for entry in ledger.entries.values():
        for decision in entry.decisions.values():
            if decision["verdict"] in ("INCONCLUSIVE", "INVALID"):
                lines.append(f"{entry.case}: {decision['message']}")
    return lines


def did_not_run(ledger: Ledger) -> list[str]:
    """One line per reason: how many tests, and the first few of them."""
    lines = []
    for reason, tests in ledger.not_run.items():
        named = ", ".join(tests[:TESTS_SHOWN]) + (f" and {len(tests) - TESTS_SHOWN} more" if len(tests) > TESTS_SHOWN else "")
        lines.append(f"{len(tests)} not run: {reason} ({named})")
    return lines


def time_spent(ledger: Ledger) -> str:
    """Where the arms' time went, largest first."""
    parts = sorted(ledger.seconds.items(), key=lambda item: -item[1])
    return ", ".join(f"{what} {spent:.0f} s" for what, spent in parts if spent >= 0.5)


def write_summary(reporter: Any, session: Any) -> None:
    """Everything pytest-fp8 says at the end of a run."""
    ledger = session.ledger
    table = summary(ledger, reporter._tw.fullwidth, reporter._tw.hasmarkup)
    missing = did_not_run(ledger) if session.settings.declared else []
    notes = findings(ledger)
    if not (table or missing or notes or session.problems or session.written):
        return
    reporter.section("FP8", sep="=")
    if table:
        reporter.write_line(table)
    if time_spent(ledger):
        reporter.write_line(f"time in arms: {time_spent(ledger)}")
    for note in notes:
        reporter.write_line(note, yellow=True)
    for path in session.written:
        reporter.write_line(f"wrote {path}")
    for line in missing:
        reporter.write_line(line, yellow=True)
    for problem in session.problems:
        reporter.write_line(problem, red=True)
