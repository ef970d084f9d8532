"""The table of cases: one list of columns for the terminal, Markdown and the page; and how tables are drawn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from pytest_fp8.report.rows import Row, number

if TYPE_CHECKING:
    from rich.table import Table

    from pytest_fp8.report.record import Record


NONE = "-"
LOOKS = {
    "PASS": ("green", "", "what was asked is shown"),
    "IMPROVED": ("green", "better", "better than the baseline: store a new one"),
    "FAIL": ("red", "FAIL", "the opposite is shown"),
    "ERROR": ("red", "error", "an arm failed, which ended a question"),
    "INVALID": ("yellow", "invalid", "the measurement was disturbed, or the arms differ in more than FP8: no answer"),
    "INCONCLUSIVE": ("yellow", "?", "the evidence does not decide: no answer"),
    "NOT_EXERCISED": ("dim", "", "there is nothing to compare with: no answer"),
    "KNOWN": ("yellow", "known", "a test failed as it was expected to"),
    "UNFINISHED": ("yellow", "", "not all tests of the case ran"),
    "SLOWER": ("magenta", "", "no failure, and FP8 is slower than BF16"),
}
"""Verdict of a cell or a case -> its style and what follows its figures on a terminal, and what it means."""
BAD = ("FAIL", "ERROR", "INVALID", "INCONCLUSIVE", "KNOWN")
"""Verdicts that a cell of the summary and of the page names."""
EXPLAINED, LONGEST = 20, 4000
"""Answers with their messages in the summary, and characters of one; GitHub shows at most a MiB of it."""


# -- the columns ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Column:
    """What the tables of cases say of one question."""

    head: str
    reads: str
    """What the figures are, in words."""
    figures: Callable[[Mapping[str, Any]], Sequence[str]]
    """The figures of an answer, each beside its limit where it has one; those that are missing are empty."""
    more: Callable[[Mapping[str, Any]], Sequence[str]] = lambda numbers: ()
    """What files have besides."""


@dataclass(frozen=True)
class Cell:
    """``verdict`` is ``SLOWER`` for an answer that is no failure where FP8 is slower than BF16, and empty where the
    question was not asked."""

    figures: str
    verdict: str
    more: Sequence[str] = ()

    @property
    def text(self) -> str:
        return "; ".join(part for part in (self.figures, *self.more) if part) or NONE


def say(text: str, numbers: Any, *names: str) -> str:
    """``text.format()`` with these numbers; empty where one is missing."""
    values = [number(numbers, name) for name in names]
    return "" if None in values else text.format(*values)


def gradients_of(numbers: Any) -> str:
    """The largest relative difference of a gradient; of gradients that any small change moves, how far their factor is
    from 1; without either, how many products were compared."""
    ways = ("{:.1%}", "gradient_error"), ("factor 1+-{:.2f}", "gain_error"), ("{:.0f} products", "products")
    return next((text for way in ways if (text := say(way[0], numbers, way[1]))), "")


def gap_of(numbers: Any) -> str:
    """The gap of the loss and its margin in brackets, rounded alike: a gap above the margin is never shown below it."""
    gap, margin = number(numbers, "gap"), number(numbers, "margin")
    if gap is None or margin is None:
        return ""
    if margin < 0.001:
        # The margin of a loss that ends near zero is a share of it, which four decimals do not show.
        return f"{gap:+.2g} (<{margin:.2g})"
    # The usual margins have three decimals, the last of them a zero already.
    return f"{gap:+.4f} (<{f'{margin:.4f}'.removesuffix('0')})"


def stored_of(numbers: Any) -> str:
    """The stored speedup that an answer's is held against."""
    busy = say("({:.3f} busy)", numbers, "gated_baseline") if numbers.get("on_busy") else ""
    return busy or say("({:.3f})", numbers, "baseline") or "(none)"


def speed_of(numbers: Any) -> Sequence[str]:
    speedup = say("{:.3f}x", numbers, "speedup")
    return (speedup, stored_of(numbers)) if speedup else ()


def interval_of(numbers: Any) -> Sequence[str]:
    """The 99 % interval, the speedup of busy time where this is judged, and the tolerance."""
    busy = say("{:.3f}x busy", numbers, "gated_speedup") if numbers.get("on_busy") else ""
    tolerance = say("may lose {:.1%}", numbers, "tolerance") if numbers.get("baseline") else ""
    return say("99 % [{:.3f}, {:.3f}]", numbers, "low", "high"), busy, tolerance


COLUMNS = {
    "layers": Column(
        "FP8 layers\nand FLOPs",
        "converted Linears of all; share of the step's FLOPs in FP8",
        lambda n: (say("{:.0f}/{:.0f}", n, "converted", "linears"), say("{:.1%}", n, "fp8_share")),
    ),
    "numerics": Column(
        "gradients\noff BF16",
        "the gradient that is furthest off BF16's, of those that are judged; each has a limit of its own",
        lambda n: (gradients_of(n),),
        lambda n: (say("limit {:.1%}", n, "gradient_limit"),),
    ),
    "loss": Column(
        "loss gap\nand margin", "FP8's loss at the end above BF16's; it may be as far up as <", lambda n: (gap_of(n),)
    ),
    "speedup": Column(
        "speedup\n(stored)",
        "BF16's time over FP8's, and that of the baseline in brackets, which it may fall short of by the tolerance",
        speed_of,
        interval_of,
    ),
    "memory": Column(
        "memory",
        "FP8's peak over BF16's, and that of the baseline, which it may exceed by 2 %",
        lambda n: (say("{:.2f}x", n, "ratio"),),
        lambda n: (say("stored {:.2f}x", n, "baseline"),),
    ),
    "checkpoints": Column("switch\nback", "whether training goes on from a checkpoint of the other arm", lambda n: ()),
}
"""Question -> its column. ``faster``, against a floor alone, stands in that of the speedup."""


def cell_of(row: Row, question: str) -> Cell:
    said, slower = (row.speed, row.slower) if question == "speedup" else (row.decisions.get(question), "")
    # Arms that could not be built answer no question.
    said = said or row.decisions.get("")
    if said is None:
        return Cell("", "")
    column = COLUMNS[question]
    figures = " ".join(filter(None, column.figures(said.numbers)))
    if question == "checkpoints" and said.verdict == "PASS":
        figures = "yes"
    more = [text for text in column.more(said.numbers) if text]
    return Cell(f"{figures} {slower}".strip(), "SLOWER" if slower else said.word, more)


def answered(rows: Iterable[Row]) -> list[str]:
    """The questions that a case has an answer to: those of the table's columns."""
    found = {question for row in rows for question in row.decisions}
    return [each for each in COLUMNS if each in found or (each == "speedup" and "faster" in found)]


def tally(rows: Iterable[Row]) -> dict[str, int]:
    """Verdict -> number of cases, the worst first."""
    return Counter(row.verdict for row in sorted(rows, key=lambda row: row.place))


def notes_of(row: Row) -> list[str]:
    """What answers name besides, such as layers whose sizes keep them out of FP8, each once: two questions share the
    times of a speedup. In a report that somebody changed something else may stand there."""
    every = [said.numbers.get("notes") for said in row.decisions.values()]
    return list(dict.fromkeys(str(note) for notes in every if isinstance(notes, list | tuple) for note in notes))


# -- Markdown, for a pull request or a job's page ---------------------------------------------------------------------


def markdown_table(columns: Sequence[str], rows: Iterable[Iterable[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (columns, ["---"] * len(columns), *rows)]


def markdown(report: Record) -> str:
    """The table of cases, the worst first; then what every answer that is not green expected, saw, and advises."""
    rows = sorted(report.entries.values(), key=lambda row: row.place)
    found = [f"{count} {_words(verdict)}" for verdict, count in tally(rows).items()]
    unfinished = ", not finished" if report.left or not report.finished else ""
    lines = [f"## FP8{unfinished}: {', '.join(found) or 'nothing ran'}", ""]
    for text in report.beside:
        lines += [f"**{_cell(text)}**", ""]
    shown, table = answered(rows), []
    for row in rows:
        verdict = "; ".join(filter(None, (_words(row.verdict), row.slower)))
        cells = [cell_of(row, question) for question in shown]
        marks = [f"**{_words(each.verdict)}** " if each.verdict in BAD else "" for each in cells]
        table.append([_cell(row.case), verdict, *(f"{m}{_cell(c.text)}" for m, c in zip(marks, cells, strict=True))])
    heads = [COLUMNS[question].head.replace("\n", " ") for question in shown]
    lines += markdown_table(["case", "verdict", *heads], table) if rows else []
    answers = [(row, said) for row in rows for said in row.decisions.values() if not said.passes]
    # What nobody knows of first: further ones are left out.
    answers.sort(key=lambda answer: answer[1].known)
    for row, said in answers[:EXPLAINED]:
        what = f"{said.what}, as known" if said.known else said.what
        message = escape(said.message[:LONGEST]).replace("\n\n", "\n")
        lines += ["", f"**{_cell(row.case)}**, {_cell(what)}", "", f"<pre>{message}</pre>"]
    if len(answers) > EXPLAINED:
        lines += ["", f"{len(answers) - EXPLAINED} more answers are in the report."]
    lines += [line for row in rows for note in notes_of(row) for line in ("", f"{_cell(row.case)}: {_cell(note)}")]
    for reason, tests in report.not_run.items():
        lines += ["", f"{len(tests)} not run: {_cell(reason)}"]
    return "\n".join(lines) + "\n"


def _words(verdict: str) -> str:
    return verdict.replace("_", " ")


def _cell(text: str) -> str:
    """Text that neither ends a cell nor is taken for Markdown, HTML or a mention of somebody."""
    line = escape(" ".join(text.split()), quote=False)
    return "".join(f"&#{ord(letter)};" if letter in "|`*_[]\\@#~!" else letter for letter in line)


# -- terminals, by rich -----------------------------------------------------------------------------------------------


def new_table(title: str = "") -> Table:
    """A table without columns and rows. Its rule is one of hyphens, which every encoding has."""
    from rich.box import Box
    from rich.table import Table

    box = Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)
    return Table(title=title or None, title_justify="left", box=box, pad_edge=False, padding=(0, 1, 0, 0))
