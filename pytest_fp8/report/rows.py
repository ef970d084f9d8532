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
ERROR = "ERROR"
"""In place of a verdict: an arm failed, which ended a question."""
NO_ANSWER = ("INVALID", "INCONCLUSIVE", "NOT_EXERCISED")


def _verdict(value: str, where: str) -> None:
    if value and value not in WORST_FIRST:
        raise PlainDataError(f"{where} is no verdict")


@dataclass(frozen=True)
class Answer:
    """What a test was told about a question."""

    test: str
    case: str
    model: str
    """The digest of what was trained: cases of one name may have several."""
    question: str
    verdict: Annotated[str, _verdict]
    """Or :data:`ERROR`; empty where the test ended as known before there was an answer."""
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

    @property
    def said(self) -> str:
        """The verdict and its code."""
        return f"{self.verdict} {self.code}" if self.code else self.verdict

    @property
    def judged(self) -> bool:
        return self.verdict not in (ERROR, "")

    @property
    def passes(self) -> bool:
        return self.verdict in ("PASS", "IMPROVED")

    @property
    def what(self) -> str:
        """What a test that it fails fails with: the question, or an error's first line."""
        return self.headline if self.verdict == ERROR else self.question


def worst_first(answers: Iterable[Answer]) -> list[Answer]:
    return sorted(answers, key=lambda each: WORST_FIRST.index(each.verdict))


@dataclass(frozen=True)
class Curve:
    """Losses of both arms from one seed, step by step, in nats or in the unit of the user's own loss."""

    seed: int
    bf16: Sequence[float | None]
    fp8: Sequence[float | None]


@dataclass(frozen=True)
class LayerShown:
    """What is known of a Linear of the unconverted model, or of another module with a product or a weight."""

    layer: str
    skipped: str = ""
    """Why it stays in BF16."""
    ran: Mapping[str, str] = field(default_factory=dict)
    """Role -> the kind of its product."""
    sqnr_db: Mapping[str, float | None] = field(default_factory=dict)
    own_sqnr_db: Mapping[str, float | None] = field(default_factory=dict)
    """What the recipe's own casts give."""
    gradient_error: float | None = None
    """How far its weight's gradient is off BF16's, as a fraction."""
    gradient_limit: float | None = None


@dataclass(frozen=True)
class Evidence:
    """What the page shows of a case beside answers."""

    curves: Sequence[Curve] = ()
    layers: Sequence[LayerShown] = ()


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
    """Why tests of this case were expected to fail, and did: a library's known defect."""
    namesakes: int = 0
    """Number of distinct models under one case id; 0 where there is one."""
    open_tests: int = 0
    """Its tests that were not run, or not to their end."""

    @cached_property
    def decisions(self) -> dict[str, Answer]:
        """Question -> the worst of what tests asserted, who may ask for another floor or other checkpoints; without
        one, what a test looked at last."""
        found = {}
        for question in dict.fromkeys(each.question for each in self.answers if each.judged):
            mine = [each for each in self.answers if each.judged and each.question == question]
            found[question] = worst_first([each for each in mine if each.asserted] or mine[-1:])[0]
        return found

    @cached_property
    def errors(self) -> dict[str, str]:
        """Code and headline of errors that ended a question without a decision -> the whole message."""
        return {each.headline: each.message for each in self.answers if each.verdict == ERROR}

    @cached_property
    def metrics(self) -> dict[str, dict[str, Any]]:
        """What a baseline would store. Of several tests with tolerances of their own the strictest counts."""
        found: dict[str, dict[str, Any]] = {}
        for name, metric in ((name, metric) for each in self.answers for name, metric in each.metrics.items()):
            found[name] = {**metric, "tolerance": min(metric["tolerance"], found.get(name, metric)["tolerance"])}
        return found

    @cached_property
    def failing(self) -> dict[str, set[str]]:
        """What tests may have failed with, as a question or an error's first line -> how these tests ended."""
        found: dict[str, set[str]] = {}
        for each in self.answers:
            if each.verdict in ("FAIL", ERROR, ""):
                found.setdefault(each.what, set()).update(self.outcomes.get(each.test, ()))
        return found

    @property
    def known(self) -> list[str]:
        """Of these, what no test failed with that was not expected to fail. A question without an answer is never
        known: no test can be expected to end so."""
        return [what for what, how in self.failing.items() if how - {"passed"} == {"known"}]

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
        """The worst of its answers; an arm's error counts as one, and so do tests that were not run. What fails as
        known does not count beside others."""
        return min(self._verdicts(known=False) or self._verdicts(), key=WORST_FIRST.index, default="NOT_EXERCISED")

    @property
    def all_known(self) -> bool:
        """Whether it has no answer besides those that are known to be no better."""
        return bool(self._verdicts()) and not self._verdicts(known=False)

    @property
    def place(self) -> float:
        """To sort cases by: the worst first, those of which all fails as known before what is green."""
        return WORST_FIRST.index("IMPROVED") - 0.5 if self.all_known else WORST_FIRST.index(self.verdict)

    def _verdicts(self, known: bool = True) -> list[str]:
        """``known``: also of what fails as known."""
        said = [each.verdict for question, each in self.decisions.items() if known or not self.knows(question)]
        said += ["FAIL" for _ in self._not_proved() if known]
        said += ["UNFINISHED"] if self.open_tests else []
        return said + [ERROR for error in self.errors if known or error not in self.known]

    def knows(self, question: str) -> bool:
        """Whether a question fails as known."""
        return self.decisions[question].verdict == "FAIL" and question in self.known

    def _not_proved(self) -> list[str]:
        """The questions of which tests ended as known before there was an answer."""
        return [what for what in self.known if what not in self.decisions and what not in self.errors]

    @property
    def as_known(self) -> str:
        """What fails as known, in words; empty where nothing does."""
        found = [question for question in self.decisions if self.knows(question)] + self._not_proved()
        found += ["an arm"] * any(error in self.known for error in self.errors)
        if found:
            return f"fails as known: {', '.join(found)}"
        return "a test fails as known" if self.expected else ""

    @property
    def speed(self) -> Answer | None:
        """The answer with the speedup's figures: against the baseline, or against the floor alone."""
        return self.decisions.get("speedup") or self.decisions.get("faster")

    @property
    def slower(self) -> str:
        """Whether FP8 is slower than BF16 by the clock of whoever trains, though its answer is no failure."""
        speed = self.speed
        if speed and speed.verdict not in ("PASS", "IMPROVED", "NOT_EXERCISED") and not self.knows(speed.question):
            return ""
        high = number(speed.numbers, "high") if speed else None
        return "slower, known" if "faster" in self.known else "slower" if high is not None and high < 1 else ""

    def plain(self) -> dict[str, Any]:
        """As ``report.json`` has it."""
        shown = ("verdict", "code", "headline", "message", "numbers")
        names = ("case_hash", "gpu", "verdict", "metrics", "timing", "errors", "expected", "known", "namesakes")
        return {
            "decisions": {q: {name: getattr(said, name) for name in shown} for q, said in self.decisions.items()},
            **{name: getattr(self, name) for name in (*names, "open_tests")},
            "evidence": to_plain(self.evidence),
        }


def number(data: Any, *path: str) -> float | None:
    """``data[path[0]][path[1]]...`` where that is a number, else ``None``."""
    for name in path:
        data = data.get(name) if isinstance(data, Mapping) else None
    # An integer may be too large to be one.
    usable = isinstance(data, int | float) and not isinstance(data, bool) and abs(data) < MOST
    return float(data) if usable else None
