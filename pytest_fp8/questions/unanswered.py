"""The decision of a question that a case cannot be asked."""

from __future__ import annotations

from pytest_fp8.case import Case
from pytest_fp8.codes import R
from pytest_fp8.verdicts import Decision, Finding, Verdict

ON_A_GPU = ("speedup", "memory")
"""Questions that emulated FP8 cannot answer."""


def cannot(case: Case, question: str) -> Decision:
    """The case is emulated and the question one of speed or memory, or its own list of questions leaves it out."""
    emulated = case.emulated and question in ON_A_GPU
    return Finding(
        R.NOT_ASKED_OF_THIS_CASE,
        Verdict.NOT_EXERCISED,
        f"case {case.id} cannot answer for {question}",
        expected="a case on a GPU" if emulated else f"{question!r} among the questions of the mark",
        seen=f"questions: {', '.join(case.questions)}",
        cause="emulated FP8 runs on the CPU, with a speed and a memory that mean nothing" if emulated else "",
        next_step="run the same case without emulated=True on a Hopper GPU"
        if emulated
        else f"add {question!r} to questions= in the mark, or leave questions= out",
    ).answer(question)
