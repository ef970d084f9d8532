"""The closing summary: one row per case, what did not run, where the time went."""

from __future__ import annotations

import io
import re
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from pytest_fp8.libraries import documentation
from pytest_fp8.questions.findings import some
from pytest_fp8.report.baselines import revision_lines
from pytest_fp8.report.cells import COLUMNS, NONE, slower_of, speed_in
from pytest_fp8.report.exports import below
from pytest_fp8.report.footnotes import folded, footnotes, lines_of, numbers_of
from pytest_fp8.report.record import Closing, Record, Row
from pytest_fp8.report.summary import not_finished

if TYPE_CHECKING:
    import pytest


MARKS = {
    "PASS": ("green", ""),
    "IMPROVED": ("green", " better"),
    "FAIL": ("red", " FAIL"),
    "INCONCLUSIVE": ("yellow", " ?"),
    "INVALID": ("yellow", " invalid"),
    "NOT_EXERCISED": ("dim", ""),
}
"""Verdict -> style of a cell, and what follows its figures."""
SLOWER = "magenta"
"""Of a case that passes and is slower than BF16: neither green nor a failure."""
HEADS = {
    "layers": "FP8 layers\nand FLOPs",
    "numerics": "gradients\noff BF16",
    "loss": "loss gap\nand margin",
    "speedup": "speedup\n(stored)",
    "memory": "memory",
    "checkpoints": "switch\nback",
}
"""Question -> head of its column. The page and the summary have the interval of the speedup besides."""
ON_A_GPU = ("speedup", "memory")
"""Questions that no emulated case answers."""
WIDTH, WIDEST = 100, 400
"""The table's width in a log, in columns of text, and one that is wide enough for any."""
CODE = re.compile(r"\bFP8-[A-Z]\d\d\b")
TESTS_SHOWN = 3
"""Names of tests in the line about tests that did not run."""


def summary(
    record: Record, color: bool, width: int | None = None, notes: Mapping[str, list[str]] = MappingProxyType({})
) -> str:
    """The table of cases, drawn by rich; empty where no case was asked anything. A question that no case has an answer
    to has no column. ``width``: of the terminal; ``None``: a log. ``notes``: see :func:`footnotes`."""
    if not record.entries:
        return ""
    from rich.console import Console
    from rich.text import Text

    from pytest_fp8.report import tables

    # rich leaves a space at the right edge, which is stripped.
    shown, room = answered(record), (width or WIDTH) + 1
    # On a file of its own: rich would look at the width of the real one.
    console = Console(file=io.StringIO(), width=room, force_terminal=color, no_color=not color, highlight=False)
    for close in (False, True):
        drawn = tables.new_table(close=close)
        drawn.add_column("case", overflow="fold")
        rows = [dict(zip(HEADS, map(Text.from_markup, row(entry)), strict=True)) for entry in record.entries.values()]
        for each in shown:
            words = (word for cell in (HEADS[each], *(cells[each].plain for cells in rows)) for word in cell.split())
            drawn.add_column(HEADS[each], min_width=max(map(len, words)), overflow="fold")
        for entry, cells in zip(record.entries.values(), rows, strict=True):
            drawn.add_row(Text(entry.case + numbers_of(notes, entry.case)), *(cells[each] for each in shown))
        if console.measure(drawn, options=console.options.update(max_width=WIDEST)).maximum <= room:
            break
    return "\n".join(tables.lines_of(drawn, console))


def answered(record: Record) -> list[str]:
    """The questions that a case has an answer to, in the order of :data:`HEADS`."""
    found = {question for entry in record.entries.values() for question in entry.decisions}
    return [each for each in HEADS if each in found or (each == "speedup" and "faster" in found)]


def remarks(record: Record) -> list[str]:
    """The lines on the table as a whole: which questions have no column and why, and why layers are left in BF16."""
    if not record.entries:
        return []
    entries, shown = record.entries.values(), answered(record)
    emulated = any(entry.gpu == "emulated" for entry in entries)
    missing = [each for each in HEADS if each not in shown and not (emulated and each in ON_A_GPU)]
    label = "without an answer" if any(entry.errors for entry in entries) else "not asked"
    said = [f"{label}: {', '.join(missing)}"] if missing else []
    said += [f"{' and '.join(ON_A_GPU)} need a GPU"] if emulated else []
    layers = (entry.decisions.get("layers", {}).get("numbers", {}) for entry in entries)
    kinds = [reason.partition(": ") for numbers in layers for reason in numbers.get("skipped", ())]
    left = [f"{kind} ({text})" for kind, _, text in kinds]
    lines = ["; ".join(said), f"left in BF16: {some(left)}" if left else ""]
    return [line for line in lines if line]


def row(entry: Row) -> list[str]:
    """The cells of one case, in the order of :data:`HEADS`; a question that was not asked is a dash."""
    told, cells = vars(entry), []
    for question in HEADS:
        texts = [text for column in COLUMNS.values() if column.question == question and (text := column.figures(told))]
        decision = speed_in(entry.decisions) if question == "speedup" else entry.decisions.get(question)
        style, mark = MARKS[decision["verdict"]] if decision else ("dim", "")
        if question == "speedup":
            stored = texts.pop().removesuffix("x") if len(texts) > 1 else "none"
            texts += [f"({stored})"] if texts else []
            if slower := slower_of(told):
                style, mark = SLOWER, f" {slower}"
        # A decision may have no numbers, as that of an arm that the GPU cannot hold.
        cells.append(f"[{style}]{_escape((' '.join(texts) + mark).strip() or NONE)}[/]")
    return cells


def _escape(text: str) -> str:
    return text.replace("[", "\\[")


def did_not_run(record: Record) -> list[str]:
    """One line per reason: how many tests, and the first few of them."""
    lines = []
    for reason, tests in record.not_run.items():
        more = f" and {len(tests) - TESTS_SHOWN} more" if len(tests) > TESTS_SHOWN else ""
        named = ", ".join(tests[:TESTS_SHOWN]) + more
        lines.append(f"{len(tests)} not run: {reason} ({named})")
    return lines


def time_in_arms(spent: Mapping[str, float]) -> str:
    """The operations that took at least half a second, largest first, in a line; empty where none did."""
    parts = sorted(spent.items(), key=lambda item: -item[1])
    named = ", ".join(f"{what} {seconds:.0f} s" for what, seconds in parts if seconds >= 0.5)
    return f"time in arms: {named}" if named else ""


def _first_code(record: Record, said: Closing) -> str:
    """Of an answer that is no PASS, of an error, or of what the session says at its end; empty where all is well."""
    entries = record.entries.values()
    answers = [str(decision["code"]) for entry in entries for decision in entry.decisions.values()]
    errors = [text for entry in entries for text in entry.errors]
    texts = [*answers, *errors, *said.problems, *said.notes]
    return next((found for text in texts for found in CODE.findall(text)), "")


def write_summary(reporter: pytest.TerminalReporter, record: Record, said: Closing, declared: bool) -> None:
    """Everything that pytest-fp8 says at the end of a run. ``declared``: whether the user named the GPU."""
    from pytest_fp8.report import tables

    # pytest offers no public name for the file that its reporter writes to.
    encoding = getattr(reporter._tw._file, "encoding", None) or "utf-8"
    width = shutil.get_terminal_size().columns if reporter.isatty else None
    notes = footnotes(record)
    table = summary(record, reporter.hasmarkup, width, notes)
    # Beside a table the tests that this machine skips need no word; without one nobody would know why it is missing.
    missing = did_not_run(record) if declared or not table else []
    missing += not_finished({"open_tests": record.open_tests})
    reporter.section("FP8", sep="=")
    # Line by line: of what an encoding cannot write pytest escapes the line ends, too.
    for line in [*table.splitlines(), *(part for remark in remarks(record) for part in folded(remark, width))]:
        reporter.write_line(tables.writable(line, encoding))
    for line in lines_of(list(notes), width):
        reporter.write_line(line, yellow=True)
    waited = Counter[str]()
    for operations in record.durations.get("waited", {}).values():
        waited.update(operations)
    spent = time_in_arms(waited)
    for line in folded(spent, width) if spent else ():
        reporter.write_line(tables.writable(line, encoding))
    for revision in said.revisions:
        for line in revision_lines(revision):
            reporter.write_line(line)
    for path in said.written:
        reporter.write_line(f"wrote {below(Path(path), reporter.config.invocation_params.dir)}")
    for line in missing + said.notes:
        reporter.write_line(line, yellow=True)
    for problem in said.problems:
        reporter.write_line(problem, red=True)
    if code := _first_code(record, said):
        reporter.write_line(f"what a code means: pytest-fp8 explain {code}; documentation: {documentation()}")
