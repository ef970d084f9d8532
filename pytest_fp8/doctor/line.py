"""One line of the doctor's."""

from __future__ import annotations

from dataclasses import dataclass

from pytest_fp8.codes import Code

OK, NOTE, PROBLEM = "ok", "note", "problem"


@dataclass(frozen=True)
class Line:
    """``state``: ``ok``, ``note`` (nothing fails, and a person should know) or ``problem`` (exit code 1), which has a
    code."""

    topic: str
    state: str
    text: str
    next_step: str = ""
    code: Code | None = None


def problem(code: Code, topic: str, text: str, next_step: str) -> Line:
    return Line(topic, PROBLEM, text, next_step, code)
