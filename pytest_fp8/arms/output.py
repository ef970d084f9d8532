"""The end of an arm's own output, as an error quotes it."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

LOG_LINES = 25
LOG_BYTES = 2**18
"""How much of an arm's output is read at most, from its end."""
STACK = re.compile("Fatal Python error|(Current t|T)hread 0x")
UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""What a terminal obeys, and what no encoding can write."""


def tail_of(log: Path) -> str:
    """The last lines of this file (:func:`end_of`); empty where it cannot be read."""
    with contextlib.suppress(OSError), open(log, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_BYTES))
        return end_of(file.read().decode(errors="replace"))
    return ""


def end_of(output: str) -> str:
    """The last lines, or those with which the last stack of :mod:`faulthandler` begins where that is longer: the
    innermost call comes first. Without what a terminal would obey."""
    lines = output.splitlines()
    stacks = [i for i, line in enumerate(lines) if STACK.match(line)]
    fatal = [i for i in stacks if lines[i].startswith("Fatal")]
    start = max(0, min([len(lines) - LOG_LINES, *(fatal or stacks)[-1:]]))
    return "\n".join(printable(line)[:400] for line in lines[start : start + LOG_LINES])


def printable(text: str) -> str:
    """The text without what a terminal obeys or no encoding can write."""
    return UNPRINTABLE.sub("", text)
