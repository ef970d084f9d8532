"""What a person should read about rows of the closing table: numbered notes below it."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from itertools import chain
from statistics import median
from typing import Any

from pytest_fp8.report.record import Record, Row
from pytest_fp8.report.undecided import NO_BASELINE

LABEL = re.compile(r" *[a-z]+: +")
"""How each line of a message after its headline begins."""


def footnotes(record: Record) -> dict[str, list[str]]:
    """Text of each note -> the rows that it is about, in the order of the table: why a case fails as known, errors of
    its arms, decisions that a person should read although their tests pass, what a PASS names besides, and what a
    session that ended early had timed."""
    notes: dict[str, list[str]] = {}
    for entry in record.entries.values():
        known = [f"fails as known: {reason}" for reason in entry.expected]
        left = unjudged(entry) if record.open_tests else []
        # pytest has shown what its tests failed with.
        errors = [f"{text.partition(':')[0]}: see above" if text in entry.failed else text for text in entry.errors]
        for text in [*known, *errors, *findings(entry), *notes_of(entry.decisions), *left]:
            notes.setdefault(text, []).append(entry.case)
    return notes


def findings(entry: Row) -> list[str]:
    """The messages of decisions that are not plain PASS and did not fail. One that several questions share is said
    once. What lacks a baseline is said once for all cases, elsewhere."""
    shared: dict[str, list[str]] = {}
    for question, decision in entry.decisions.items():
        if decision["verdict"] not in ("PASS", "FAIL") and decision.get("code") not in NO_BASELINE:
            shared.setdefault(decision["message"], []).append(question)
    return [f"{entry.case} {', '.join(questions)}: {message}" for message, questions in shared.items()]


def unjudged(entry: Row) -> list[str]:
    """What a session that ended early has timed, and no decision tells of."""
    if not entry.timing or {"speedup", "faster"} & entry.decisions.keys():
        return []
    pairs = entry.timing["processes"]
    bf16, fp8 = (median(chain.from_iterable(pair[arm] for pair in pairs)) for arm in ("bf16", "fp8"))
    return [
        f"timed and not judged: BF16 {bf16:.2f} ms, FP8 {fp8:.2f} ms a step, {bf16 / fp8:.3f}x in the median of "
        f"{len(pairs)} pair(s) of processes; whether both did the same work was not compared"
    ]


def notes_of(decisions: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What decisions name besides, such as layers whose sizes keep them out of FP8, each once: two questions share the
    times of a speedup. In a report that somebody changed something else may stand there."""
    every = [decision["numbers"].get("notes") for decision in decisions.values()]
    return list(dict.fromkeys(str(note) for notes in every if isinstance(notes, list | tuple) for note in notes))


def numbers_of(notes: Mapping[str, list[str]], case: str) -> str:
    """What stands behind the name of a case in the table: `` [1] [3]``."""
    return "".join(f" [{number}]" for number, cases in enumerate(notes.values(), 1) if case in cases)


def lines_of(notes: Sequence[str], width: int | None) -> list[str]:
    """The notes with their numbers, in lines no longer than ``width``; ``None``: as long as they are."""
    return [
        line
        for number, text in enumerate(notes, 1)
        for part in f"[{number}] {text}".splitlines()
        for line in folded(part, width)
    ]


def folded(line: str, width: int | None) -> list[str]:
    """The line in lines no longer than ``width``, the further ones indented; ``None``: in one."""
    # What to do next is often a command: whoever copies it needs it in one piece.
    if width is None or line.lstrip().startswith("next:"):
        return [line]
    label = LABEL.match(line)
    indent = " " * (label.end() if label else len(line) - len(line.lstrip()) or 4)
    wrap = textwrap.TextWrapper(width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return wrap.wrap(line) or [line]
