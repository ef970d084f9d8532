"""What a check says: a verdict and the lines that explain it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, NoReturn

from pytest_fp8.codes import Code
from pytest_fp8.errors import explain
from pytest_fp8.plain import to_plain


class Verdict(StrEnum):
    """Equal to its name: ``decision.verdict == "PASS"``. FAIL fails a test. INCONCLUSIVE, INVALID and NOT_EXERCISED are
    shown and fail a test under ``--fp8-strict``; on a declared GPU they fail the session at its end."""

    PASS = "PASS"
    IMPROVED = "IMPROVED"
    """Better than the baseline by more than noise. It passes; the baseline should be measured anew, for it does not
    protect the gain."""
    FAIL = "FAIL"
    INCONCLUSIVE = "INCONCLUSIVE"
    """The evidence does not decide, after all looks that the rule allows."""
    INVALID = "INVALID"
    """The evidence cannot be used: the measurement was disturbed."""
    NOT_EXERCISED = "NOT_EXERCISED"
    """There was nothing to compare the evidence with, e.g. no baseline."""

    @property
    def passes(self) -> bool:
        """Whether a test with this verdict passes under ``--fp8-strict`` too."""
        return self in (Verdict.PASS, Verdict.IMPROVED)


WORST_FIRST = ("FAIL", "ERROR", "INVALID", "INCONCLUSIVE", "UNFINISHED", "NOT_EXERCISED", "KNOWN", "IMPROVED", "PASS")
"""Verdicts, the error of an arm, a case of which not all tests ran, and a failure that was expected."""
SHOWN_AS = {
    "IMPROVED": ("improved", "+", "IMPROVED"),
    "INCONCLUSIVE": ("inconclusive", "?", "INCONCLUSIVE"),
    "INVALID": ("invalid", "!", "INVALID"),
    "NOT_EXERCISED": ("not exercised", "-", "NOT EXERCISED"),
}
"""Verdict -> how pytest counts a test, its letter, and its word under ``-v``."""


@dataclass(frozen=True)
class Figures:
    """What a question measured, with units in the names; ``None`` where it was not measured."""


@dataclass(frozen=True)
class Finding:
    """What a check found. ``code`` says which cause; ``None`` for PASS alone."""

    code: Code | None
    verdict: Verdict
    headline: str
    expected: str = ""
    seen: str = ""
    cause: str = ""
    next_step: str = ""
    about: str = ""
    """The layer, weight, operator or setting that it is about."""

    def __post_init__(self) -> None:
        if (self.code is None) is not (self.verdict is Verdict.PASS):
            raise ValueError(f"a finding has a code unless it is PASS: {self.verdict.value}: {self.headline}")

    @property
    def message(self) -> str:
        first = " ".join(filter(None, (self.verdict.value, self.code)))
        return explain(f"{first}: {self.headline}", self.expected, self.seen, self.cause, self.next_step)

    def answer(self, question: str, figures: Figures | None = None) -> Decision:
        """This finding as the answer to ``question``, with its figures."""
        lines = {field.name: getattr(self, field.name) for field in fields(Finding)}
        return Decision(**lines, question=question, figures=figures)


@dataclass(frozen=True)
class Decision(Finding):
    """One question's answer: what was found, and the figures behind it."""

    question: str = ""
    figures: Figures | None = None

    def __bool__(self) -> NoReturn:
        """Raises ``TypeError``: as any other object, a FAIL would be true, and ``assert fp8_pair.layers()`` green."""
        __tracebackhide__ = True
        asked = f"fp8_pair.assert_{self.question}() fails the test where it says so"
        raise TypeError(f"a decision on {self.question!r} has no truth value, or a FAIL would be true: {asked}")

    @property
    def numbers(self) -> dict[str, Any]:
        """The figures as plain data, for reports."""
        return to_plain(self.figures) or {}


def passed(headline: str) -> Finding:
    return Finding(None, Verdict.PASS, headline)
