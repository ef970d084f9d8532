"""Tables of the command line, drawn by rich: coloured on a terminal, plain text anywhere else."""

from __future__ import annotations

import sys
from collections.abc import Sequence

NARROWEST, WIDEST = 126, 150
"""Columns; a log or a pipe has no width of its own, and gets what the table needs between these."""


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], styles: Sequence[str] = ()) -> None:
    """Print a table; ``styles`` gives one per row. The first column is never folded."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for index, column in enumerate(columns):
        drawn.add_column(column, no_wrap=index == 0, overflow="fold")
    for index, row in enumerate(rows):
        drawn.add_row(*(Text(cell) for cell in row), style=styles[index] if styles else None)
    console = Console(file=sys.stdout, highlight=False)
    if not console.is_terminal:
        console = Console(file=sys.stdout, highlight=False, width=WIDEST, no_color=True)
        console.width = max(NARROWEST, console.measure(drawn).maximum)
    with console.capture() as captured:
        console.print(drawn)
    for line in captured.get().splitlines():
        if line.strip():
            print(line.rstrip())
