"""What tests were told, and a row for each case: the folds that tables, page and ``report.json`` show."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any

from pytest_fp8.plain import PlainDataError, to_plain
from pytest_fp8.verdicts import WORST_FIRST

MOST = 1e300
"""No figure of a report is larger."""
ERROR, KNOWN = "ERROR", "KNOWN"
"""In place of a verdict: an arm failed, which ended a question; a test failed as it was expected to."""
FAILS = ("FAIL", ERROR)
NO_ANSWER = ("INVALID", "INCONCLUSIVE", "NOT_EXERCISED")


def _verdict(value: str, where: str) -> None:
    if value not in WORST_FIRST:
        raise PlainDataError(f"{where} is no verdict")


@dataclass(frozen=True)
class Answer:
    """What a test was told about a question."""

    test: str
    case: str
    model: str
    """The digest of what was trained: cases of one name may have several."""
    question: str
    """Empty for the error of an arm that was not there to be asked anything."""
    verdict: Annotated[str, _verdict]
    """Or :data:`ERROR`."""
    code: str | None = None
    headline: str = ""
    """Of an error with its code."""
    message: str = ""
    numbers: Mapping[str, Any] = field(default_factory=dict)
    """The figures behind it, as plain data."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """What a baseline would store of it: metric -> unit, direction, tolerance, values."""
    asserted: bool = False
    """Whether the test asserted it. One that a test only looked at is its own affair."""

    known: bool = False
    """Whether it fails, and its test was expected to."""

    @property
    def word(self) -> str:
        """The verdict, as reports show and sort it."""
        return KNOWN if self.known else self.verdict

    @property
    def said(self) -> str:
        """The verdict and its code."""
        return f"{self.verdict} {self.code}" if self.code else self.verdict

    @property
    def passes(self) -> bool:
        return self.verdict in ("PASS", "IMPROVED")

    @property
    def what(self) -> str:
        """What it is about, in words."""
        return self.question or "an arm"


def worst_first(answers: Iterable[Answer]) -> list[Answer]:
    return sorted(answers, key=lambda each: WORST_FIRST.index(each.word))


@dataclass(frozen=True)
class Curve:
    """Losses of both arms from one seed, step by step, in nats or in the unit of the user's own loss."""

    seed: int
    bf16: Sequence[float | None]
    fp8: Sequence[float | None]


@dataclass(frozen=True)
class Evidence:
    """What the page shows of a case beside answers."""

    curves: Sequence[Curve] = ()
    layers: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Layer -> column -> what is known of it, in words: see :func:`pytest_fp8.report.evidence.layers_of`."""


@dataclass
class Row:
    """A case and its model."""

    case: str
    answers: Sequence[Answer] = ()
    outcomes: Mapping[str, Collection[str]] = field(default_factory=dict)
    """Test -> how it ended, each time that it was run: see :class:`~pytest_fp8.report.record.Ended`."""
    case_hash: str = ""
    gpu: str = ""
    timing: Mapping[str, Any] = field(default_factory=dict)
    evidence: Evidence = Evidence()
    expected: Sequence[str] = ()
    """Why its tests were expected to fail, and did: a library's known defect."""
    namesakes: int = 0
    """Number of distinct models under one case id; 0 where there is one."""
    open_tests: int = 0
    """Its tests that were not run, or not to their end."""

    @cached_property
    def decisions(self) -> dict[str, Answer]:
        """Question -> the worst of what tests asserted, who may ask for another floor or other checkpoints, or an arm's
        error; without one, what a test looked at last."""
        found = {}
        for question in dict.fromkeys(each.question for each in self.answers):
            mine = [each for each in self.answers if each.question == question]
            found[question] = worst_first(
                [each for each in mine if each.asserted or each.verdict == ERROR] or mine[-1:]
            )[0]
        return found

    @property
    def known(self) -> list[str]:
        """Questions that fail in tests that were expected to, and in no other."""
        return [question for question, said in self.decisions.items() if said.known]

    @cached_property
    def metrics(self) -> dict[str, dict[str, Any]]:
        """What a baseline would store. Of several tests with tolerances of their own the strictest counts."""
        found: dict[str, dict[str, Any]] = {}
        for name, metric in ((name, metric) for each in self.answers for name, metric in each.metrics.items()):
            found[name] = {**metric, "tolerance": min(metric["tolerance"], found.get(name, metric)["tolerance"])}
        return found

    @property
    def errors(self) -> list[Answer]:
        """Of its arms, each once: one that fails in being built fails in each test."""
        return list({each.headline: each for each in self.answers if each.verdict == ERROR}.values())

    def asserted(self) -> list[Answer]:
        """How each question ended that a test asserted: with its missing answer where it has one, beside which the FAIL
        of another test may be known."""
        found = []
        for question in dict.fromkeys(each.question for each in self.answers if each.asserted):
            mine = worst_first(each for each in self.answers if each.asserted and each.question == question)
            found.append(next((each for each in mine if each.verdict in NO_ANSWER), mine[0]))
        return found

    def swallowed(self) -> list[str]:
        """Questions that a test asserted and that came out as FAIL, and the test passed: somebody caught the
        exception."""
        fails = [each for each in self.answers if each.asserted and each.verdict == "FAIL"]
        return [each.question for each in fails if {*self.outcomes.get(each.test, ())} == {"passed"}]

    # -- its verdict ------------------------------------------------------------------------------------------------

    @property
    def verdict(self) -> str:
        """The worst of its answers; tests that were not run count as one."""
        found = [said.word for said in self.decisions.values()] + ["UNFINISHED"] * bool(self.open_tests)
        return min(found, key=WORST_FIRST.index, default="NOT_EXERCISED")

    @property
    def place(self) -> int:
        """To sort cases by: the worst first."""
        return WORST_FIRST.index(self.verdict)

    @property
    def speed(self) -> Answer | None:
        """The answer with the speedup's figures: against the baseline, or against the floor alone."""
        return self.decisions.get("speedup") or self.decisions.get("faster")

    @property
    def slower(self) -> str:
        """Whether FP8 is slower than BF16 by the clock of whoever trains, though its answer is no failure."""
        speed = self.speed
        if speed is None or not (speed.passes or speed.word in ("NOT_EXERCISED", KNOWN)):
            return ""
        high = number(speed.numbers, "high")
        return "slower" if high is not None and high < 1 else ""

    def plain(self) -> dict[str, Any]:
        """As ``report.json`` has it."""
        shown = ("verdict", "code", "headline", "message", "numbers")
        names = ("case_hash", "gpu", "verdict", "metrics", "timing", "expected", "known", "namesakes", "open_tests")
        return {
            "decisions": {q: {name: getattr(said, name) for name in shown} for q, said in self.decisions.items()},
            **{name: getattr(self, name) for name in names},
            "evidence": to_plain(self.evidence),
        }


def number(data: Any, *path: str) -> float | None:
    """``data[path[0]][path[1]]...`` where that is a number, else ``None``."""
    for name in path:
        data = data.get(name) if isinstance(data, Mapping) else None
    # An integer may be too large to be one.
    usable = isinstance(data, int | float) and not isinstance(data, bool) and abs(data) < MOST
    return float(data) if usable else None
