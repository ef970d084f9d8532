"""What an unanswered question does to a session: on a declared GPU it is not green. Pure.

A test asks for an answer. INVALID and NOT_EXERCISED are none, and INCONCLUSIVE is none either, but chance gives a few
of them: those have a budget. A missing baseline is no fault of the change under test: it fails where nobody looks (CI).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pytest_fp8.codes import M, R, S
from pytest_fp8.report.record import Answer

BUDGET = 0.05
"""Share of the asked questions that may end INCONCLUSIVE, and one at least. Of 4248 questions asked of sound models
none did (docs/compatibility.md)."""
NO_BASELINE = S.NO_BASELINE, M.NO_BASELINE
"""A question was NOT_EXERCISED because nothing is stored."""


@dataclass(frozen=True)
class Unanswered:
    """``problems`` fail the session, ``notes`` are for a person to read."""

    problems: list[str]
    notes: list[str]


def passed_without(answers: Sequence[Answer]) -> list[str]:
    """The note of a session on no declared GPU, whose tests pass where they have no answer; empty where all have."""
    none = sum(answer.verdict in ("INVALID", "NOT_EXERCISED", "INCONCLUSIVE") for answer in answers)
    if not none:
        return []
    return [f"{none} of {len(answers)} questions have no answer, and no test fails for that; --fp8-strict fails them"]


def unanswered(answers: Sequence[Answer], *, gpu: str, fails: bool, in_ci: bool, first_steps: str = "") -> Unanswered:
    """Judge the answers of a run on the declared ``gpu``.

    ``fails``: whether an unanswered question fails the session; under ``--fp8-strict`` its test does. ``in_ci``:
    whether a missing baseline fails, too. ``first_steps``: the commands that end the lack of baselines.
    """
    allowed = max(1, math.floor(BUDGET * len(answers)))
    missing = [a for a in answers if a.code in NO_BASELINE]
    never = [a for a in answers if a.verdict in ("INVALID", "NOT_EXERCISED") and a.code not in NO_BASELINE]
    open_ = [a for a in answers if a.verdict == "INCONCLUSIVE"]
    listed = never + (open_ if len(open_) > allowed else [])
    problems: list[str] = []
    notes: list[str] = []
    if listed:
        over = f"; {len(open_)} INCONCLUSIVE where {allowed} may be" if len(open_) > allowed else ""
        problems.append(
            f"{R.UNANSWERED}: {len(listed)} of {len(answers)} questions have no answer on the declared GPU{over}. "
            "A question without an answer is not green:\n"
            + "".join(f"  {each.case} {each.question}: {each.said}: {each.headline}\n" for each in listed)
            + "  next: do what each message above says, or run again where the GPU was disturbed"
        )
    if missing:
        cases = sorted({a.case for a in missing})
        text = f"no baseline for {len(cases)} case(s) on {gpu}, so {len(missing)} question(s) compared with nothing"
        (problems if in_ci else notes).append(f"{R.NO_BASELINES}: {text}; next: {first_steps}")
    return Unanswered(problems if fails else [], notes if fails else problems + notes)
