"""What a session says on the terminal: where a failure is, the closing table and what stands below it."""

from __future__ import annotations

import io
import math
import re
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any

from pytest_fp8.case import ON_A_GPU
from pytest_fp8.codes import M, R, S
from pytest_fp8.libraries import documentation
from pytest_fp8.questions.findings import some
from pytest_fp8.report.baselines import revision_lines
from pytest_fp8.report.record import Closing, Record
from pytest_fp8.report.rows import FAILS, NO_ANSWER, Answer, Row
from pytest_fp8.report.table import COLUMNS, LOOKS, NONE, answered, cell_of, new_table, notes_of

if TYPE_CHECKING:
    import pytest


WIDTH = 100
"""The table's width in a log, in columns of text."""
CODE = re.compile(r"\bFP8-[A-Z]\d\d\b")
BUDGET = 0.05
"""Share of the asked questions that may end INCONCLUSIVE, and one at least. Of 1080 questions asked of sound models
none did (docs/limits.md)."""
NO_BASELINE = S.NO_BASELINE, M.NO_BASELINE
"""A question was NOT_EXERCISED because nothing is stored."""
OURS = str(Path(__file__).parents[1])
RUNNERS = ("_pytest", "pluggy")


# -- a failure --------------------------------------------------------------------------------------------------------


def end_at_the_users_line(trace: TracebackType | None) -> None:
    """Cut the frames of this package off the end of a traceback, in place, and those of code without a file, as a data
    class's __init__. One without a user's line stays whole."""
    last = None
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith((OURS, "<")):
            last = None if any(f"/{name}/" in file for name in RUNNERS) else trace
        trace = trace.tb_next
    if last is not None:
        last.tb_next = None


def headline_first(report: Any, error: BaseException) -> None:
    """The closing FAILED line begins with what was found: the class of the error would push it off the line."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        crash.message = str(error)


# -- the closing summary ----------------------------------------------------------------------------------------------


def summary(
    record: Record, color: bool, width: int | None = None, notes: Mapping[str, list[str]] = MappingProxyType({})
) -> str:
    """The table of cases, drawn by rich; empty where no case was asked anything. A question that no case has an answer
    to has no column. ``width``: of the terminal; ``None``: a log. ``notes``: see :func:`footnotes`."""
    if not record.entries:
        return ""
    from rich.console import Console
    from rich.text import Text

    drawn, shown = new_table(), answered(record.entries.values())
    drawn.add_column("case", overflow="fold")
    rows = [[marked(row, question) for question in shown] for row in record.entries.values()]
    for index, question in enumerate(shown):
        head = COLUMNS[question].head
        longest = max(len(word) for text in (head, *(row[index][0] for row in rows)) for word in text.split())
        drawn.add_column(head, min_width=longest, overflow="fold")
    for name, row in zip(record.entries, rows, strict=True):
        numbers = "".join(f" [{number}]" for number, cases in enumerate(notes.values(), 1) if name in cases)
        drawn.add_row(Text(name + numbers), *(Text(text, style) for text, style in row))
    # rich leaves a space at the right edge, which is stripped. On a file of its own: rich would look at the width of
    # the real one.
    console = Console(
        file=io.StringIO(), width=(width or WIDTH) + 1, force_terminal=color, no_color=not color, highlight=False
    )
    with console.capture() as captured:
        console.print(drawn, crop=False)
    return "\n".join(line.rstrip() for line in captured.get().splitlines() if line.strip())


def marked(row: Row, question: str) -> tuple[str, str]:
    """A cell's text and style."""
    cell = cell_of(row, question)
    style, mark, _ = LOOKS.get(cell.verdict, ("dim", "", ""))
    return f"{cell.figures} {mark}".strip() or NONE, style


def remarks(record: Record) -> list[str]:
    """The lines on the table as a whole: which questions have no answer, and why layers are left in BF16."""
    rows = record.entries.values()
    emulated, shown = any(row.gpu == "emulated" for row in rows), answered(rows)
    missing = [each for each in COLUMNS if rows and each not in shown and not (emulated and each in ON_A_GPU)]
    parts = [f"no case has an answer to: {', '.join(missing)}"] if missing else []
    parts += [f"{' and '.join(ON_A_GPU)} need a GPU"] if emulated else []
    said = ["; ".join(parts)] if parts else []
    layers = (row.decisions["layers"].numbers for row in rows if "layers" in row.decisions)
    kinds = [reason.partition(": ") for numbers in layers for reason in numbers.get("skipped", ())]
    left = [f"{kind} ({text})" for kind, _, text in kinds]
    return [*said, *([f"left in BF16: {some(left)}"] if left else [])]


def footnotes(record: Record) -> dict[str, list[str]]:
    """Text of each note below the table -> the rows that it is about, in the order of the table: why a case fails as
    known, what failed, errors of its arms, answers that a person should read although its tests pass, what a PASS names
    besides."""
    notes: dict[str, list[str]] = {}
    for row in record.entries.values():
        known = [f"fails as known: {reason}" for reason in row.expected]
        # pytest has shown what its tests failed with.
        above = {each.headline for each in row.answers if "failed" in row.outcomes.get(each.test, ())}
        errors = [f"{each.code}: see above" if each.headline in above else each.headline for each in row.errors]
        failed = [
            f"{question}: {said.said}: {said.headline}: see above"
            for question, said in row.decisions.items()
            if said.word == "FAIL" and said.headline in above
        ]
        for text in [*known, *failed, *errors, *findings(row), *notes_of(row)]:
            notes.setdefault(text, []).append(row.case)
    return notes


def findings(row: Row) -> list[str]:
    """The messages of answers that are not plain PASS and did not fail. One that several questions share is said once.
    What lacks a baseline is said once for all cases, elsewhere."""
    shared: dict[str, list[str]] = {}
    for question, said in row.decisions.items():
        if said.verdict not in ("PASS", *FAILS) and said.code not in NO_BASELINE:
            shared.setdefault(said.message, []).append(question)
    return [f"{row.case} {', '.join(questions)}: {message}" for message, questions in shared.items()]


def did_not_run(record: Record) -> list[str]:
    """One line per reason: how many tests, and the first few of them."""
    return [f"{len(tests)} not run: {reason} ({some(tests)})" for reason, tests in record.not_run.items()]


def time_in_arms(spent: Mapping[str, float]) -> str:
    """The operations that took at least half a second, largest first, in a line; empty where none did."""
    parts = sorted(spent.items(), key=lambda item: -item[1])
    named = ", ".join(f"{what} {seconds:.0f} s" for what, seconds in parts if seconds >= 0.5)
    return f"time in arms: {named}" if named else ""


def _first_code(record: Record, said: Closing) -> str:
    """Of an answer that is no PASS, of an error, or of what the session says at its end; empty where all is well."""
    answers = [str(each.code) for row in record.entries.values() for each in row.decisions.values()]
    return next((found for text in [*answers, *said.problems, *said.notes] for found in CODE.findall(text)), "")


def write_summary(reporter: pytest.TerminalReporter, record: Record, said: Closing, declared: bool) -> None:
    """Everything that pytest-fp8 says at the end of a run. ``declared``: whether the user named the GPU."""
    notes = footnotes(record)
    table = summary(record, reporter.hasmarkup, shutil.get_terminal_size().columns if reporter.isatty else None, notes)
    # Beside a table the tests that this machine skips need no word; without one nobody would know why it is missing.
    missing = did_not_run(record) if declared or not table else []
    missing += record.left
    waited = Counter[str]()
    for operations in record.durations.get("waited", {}).values():
        waited.update(operations)
    reporter.section("FP8", sep="=")
    # Line by line: of what an encoding cannot write pytest escapes the line ends, too.
    for line in [*table.splitlines(), *remarks(record)]:
        reporter.write_line(line)
    for number, text in enumerate(notes, 1):
        for line in f"[{number}] {text}".splitlines():
            reporter.write_line(line, yellow=True)
    if spent := time_in_arms(waited):
        reporter.write_line(spent)
    for line in (line for revision in said.revisions for line in revision_lines(revision)):
        reporter.write_line(line)
    folder = reporter.config.invocation_params.dir
    for path in map(Path, said.written):
        reporter.write_line(f"wrote {path.relative_to(folder) if path.is_relative_to(folder) else path}")
    for line in missing + said.notes:
        reporter.write_line(line, yellow=True)
    for problem in said.problems:
        reporter.write_line(problem, red=True)
    if code := _first_code(record, said):
        reporter.write_line(f"what a code means: pytest-fp8 explain {code}; documentation: {documentation()}")


# -- questions without an answer --------------------------------------------------------------------------------------


def unanswered(answers: Sequence[Answer], *, gpu: str, in_ci: bool) -> tuple[list[str], list[str]]:
    """What fails a session on the declared ``gpu`` since it has no answer, and what a person should read.

    A test asks for an answer. INVALID and NOT_EXERCISED are none, and INCONCLUSIVE is none either, but chance gives a
    few of them: those have a budget. A missing baseline is no fault of the change under test: it fails where nobody
    looks (``in_ci``).
    """
    allowed = max(1, math.floor(BUDGET * len(answers)))
    missing = [each for each in answers if each.code in NO_BASELINE]
    never = [each for each in answers if each.verdict in ("INVALID", "NOT_EXERCISED") and each not in missing]
    undecided = [each for each in answers if each.verdict == "INCONCLUSIVE"]
    listed = never + (undecided if len(undecided) > allowed else [])
    problems: list[str] = []
    notes: list[str] = []
    if listed:
        over = f"; {len(undecided)} INCONCLUSIVE where {allowed} may be" if len(undecided) > allowed else ""
        if undecided and not over:
            over = f", besides {len(undecided)} INCONCLUSIVE, which may be"
        problems.append(
            f"{R.UNANSWERED}: {len(listed)} of {len(answers)} questions have no answer on the declared GPU{over}. "
            "A question without an answer is not green:\n"
            + "".join(f"  {each.case} {each.question}: {each.said}: {each.headline}\n" for each in listed)
            + "  next: do what each message above says, or run again where the GPU was disturbed"
        )
    if missing:
        cases = len({each.case for each in missing})
        named = some([f"{each.case} {each.question}" for each in missing])
        text = f"no baseline for {cases} case(s) on {gpu}, so {len(missing)} question(s) compared with nothing: {named}"
        (problems if in_ci else notes).append(f"{R.NO_BASELINES}: {text}; next: {R.NO_BASELINES.page.instead}")
    return problems, notes


def passed_without(answers: Sequence[Answer]) -> list[str]:
    """The note of a session on no declared GPU, whose tests pass where they have no answer; empty where all have."""
    none = sum(answer.verdict in NO_ANSWER for answer in answers)
    if not none:
        return []
    return [f"{none} of {len(answers)} questions have no answer, and no test fails for that; --fp8-strict fails them"]
