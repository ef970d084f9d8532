"""Tables, drawn by rich: the one look of them, and the tables of the command line."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

NARROWEST, WIDEST = 126, 150
"""Columns of text; a log or a pipe has no width of its own, and gets what the table needs between these."""


def markdown_row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def markdown_table(columns: Sequence[str], rows: Iterable[Iterable[str]]) -> list[str]:
    return [*map(markdown_row, (columns, ["---"] * len(columns), *rows))]


def new_table(title: str = "", close: bool = False) -> Table:
    """A table without columns and rows. ``close``: two spaces between columns, not three."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    padding = (0, 1, 0, 0) if close else (0, 1)
    return Table(title=title or None, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=padding)


def lines_of(table: Table, console: Console) -> list[str]:
    """The table as lines of text, without empty lines and trailing spaces."""
    with console.capture() as captured:
        console.print(table, crop=False)
    return [line.rstrip() for line in captured.get().splitlines() if line.strip()]


def writable(line: str, encoding: str) -> str:
    """The line with a rule of hyphens where the encoding has none that is drawn, as ASCII has not."""
    try:
        line.encode(encoding)
    except UnicodeEncodeError:
        return line.replace("\u2500", "-")
    return line


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], styles: Sequence[str] = ()) -> None:
    """Print a table, coloured on a terminal; ``styles`` gives one per row. The first column is never folded."""
    from rich.console import Console
    from rich.text import Text

    drawn = new_table()
    for index, column in enumerate(columns):
        drawn.add_column(column, no_wrap=index == 0, overflow="fold")
    for index, row in enumerate(rows):
        drawn.add_row(*(Text(cell) for cell in row), style=styles[index] if styles else None)
    console = Console(file=sys.stdout, highlight=False)
    if not console.is_terminal:
        console = Console(file=sys.stdout, highlight=False, width=WIDEST, no_color=True)
        console.width = max(NARROWEST, console.measure(drawn).maximum)
    for line in lines_of(drawn, console):
        print(line)
