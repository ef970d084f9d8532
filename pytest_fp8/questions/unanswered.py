"""Decisions of questions that no arm can answer: of a case that cannot be asked, of an arm that the GPU cannot hold."""

from __future__ import annotations

from pytest_fp8.case import Case
from pytest_fp8.errors import Fp8Error
from pytest_fp8.verdicts import Decision, Verdict


def cannot(case: Case, question: str) -> Decision:
    """The case is emulated, or its own list of questions leaves this one out."""
    return Decision(
        question,
        Verdict.NOT_EXERCISED,
        f"case {case.id} cannot answer for {question}",
        expected="a case on a GPU that asks it",
        seen=f"questions: {', '.join(case.questions)}",
        cause="emulated FP8 runs on the CPU, at no speed that means anything" if case.emulated else "",
        next_step="run the same case without emulated=True on a Hopper GPU",
    )


def not_held(question: str, error: Fp8Error) -> Decision:
    """``error``: of an arm that does not fit the GPU alone."""
    return Decision(
        question,
        Verdict.NOT_EXERCISED,
        error.headline,
        expected=error.expected,
        seen=error.seen,
        cause=error.cause,
        next_step=error.next_step,
    )
