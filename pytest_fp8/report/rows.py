"""What ``report.json`` holds: a row for each case with its answers, and what is known of the session besides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pytest_fp8.verdicts import WORST_FIRST, Verdict

SCHEMA = 2
"""The number of what ``report.json`` holds; it grows where a field that readers use changes its meaning or goes."""
MOST = 1e300
"""No figure of a report is larger."""


@dataclass(frozen=True)
class Said:
    """An answer to a question, as reports have it."""

    verdict: Verdict
    code: str | None
    headline: str
    message: str
    numbers: Mapping[str, Any]
    """The figures behind it, as plain data."""


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
    differences: Sequence[Said] = ()
    """What the arms did differently, and FP8 does not explain."""


@dataclass
class Row:
    """A case and its model, as tables and ``report.json`` have it."""

    case: str
    case_hash: str = ""
    gpu: str = ""
    decisions: dict[str, Said] = field(default_factory=dict)
    """Question -> the worst of what tests asserted, who may ask for another floor or other checkpoints; without one,
    what a test looked at last."""
    metrics: dict[str, dict[str, Any]] = field(default_factory=dict)
    timing: dict[str, Any] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    """Code and headline of errors that ended a question without a decision -> the whole message."""
    expected: list[str] = field(default_factory=list)
    """Why tests of this case were expected to fail, and did: a library's known defect."""
    known: list[str] = field(default_factory=list)
    """Questions, and first lines of errors, that such tests failed with."""
    failed: list[str] = field(default_factory=list)
    """The same of tests that were not expected to fail."""
    asserted: list[str] = field(default_factory=list)
    """Questions that a test asserted."""
    namesakes: int = 0
    """Number of distinct models under one case id; 0 where there is one."""
    evidence: Evidence = Evidence()
    open_tests: int = 0
    """Its tests that were not run, or not to their end."""
    unanswered: dict[str, Said] = field(default_factory=dict)
    """Asserted question -> its worst answer that is none, where ``decisions`` has the FAIL of another test, which may
    be known."""

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
        said = [str(each.verdict) for question, each in self.decisions.items() if known or not self.knows(question)]
        said += ["FAIL" for _ in self._not_proved() if known]
        said += ["UNFINISHED"] if self.open_tests else []
        return said + ["ERROR" for error in self.errors if known or not self.is_known(error)]

    def knows(self, question: str) -> bool:
        """Whether a question fails as known. One without an answer does not: no test can be expected to end so."""
        return self.decisions[question].verdict == "FAIL" and self.is_known(question)

    def is_known(self, what: str) -> bool:
        """Whether all tests that failed with this question, or with this arm's error, were expected to."""
        return what in self.known and what not in self.failed

    def _not_proved(self) -> list[str]:
        """The questions of which tests ended as known before there was an answer."""
        return [what for what in self.known if what not in {*self.decisions, *self.errors} and self.is_known(what)]

    @property
    def as_known(self) -> str:
        """What fails as known, in words; empty where nothing does."""
        found = [question for question in self.decisions if self.knows(question)] + self._not_proved()
        found += ["an arm"] * any(map(self.is_known, self.errors))
        if found:
            return f"fails as known: {', '.join(found)}"
        return "a test fails as known" if self.expected else ""

    @property
    def speed(self) -> Said | None:
        """The answer with the speedup's figures: against the baseline, or against the floor alone."""
        return self.decisions.get("speedup") or self.decisions.get("faster")

    @property
    def slower(self) -> str:
        """Whether FP8 is slower than BF16 by the clock of whoever trains, though its answer is no failure."""
        speed, known = self.speed, self.is_known("faster")
        if speed and speed.verdict not in ("PASS", "IMPROVED", "NOT_EXERCISED"):
            question = "speedup" if "speedup" in self.decisions else "faster"
            if not self.knows(question):
                return ""
        high = number(speed.numbers, "high") if speed else None
        return "slower, known" if known else "slower" if high is not None and high < 1 else ""


def number(data: Any, *path: str) -> float | None:
    """``data[path[0]][path[1]]...`` where that is a number, else ``None``."""
    for name in path:
        data = data.get(name) if isinstance(data, Mapping) else None
    # An integer may be too large to be one.
    usable = isinstance(data, int | float) and not isinstance(data, bool) and abs(data) < MOST
    return float(data) if usable else None


@dataclass(frozen=True)
class Origin:
    """Where and with what a session measured; see ``baselines/provenance.py``."""

    date: str
    commit: str
    dirty: bool | None
    gpu: Mapping[str, Any]
    libraries: Mapping[str, str]
    reason: str
    run: str


@dataclass(frozen=True)
class Report:
    """``report.json``."""

    schema: int
    entries: Mapping[str, Row]
    not_run: Mapping[str, Sequence[str]]
    """Reason -> tests."""
    ran: int
    ran_on_gpu: int
    collected: Sequence[str]
    """Names under which baselines of the collected cases may be stored."""
    partial: bool
    durations: Mapping[str, Any]
    failed_tests: Sequence[str]
    """Those that failed with something else than an answer."""
    open_tests: Mapping[str, Sequence[str]]
    """Case -> tests that were not run, or not to their end."""
    finished: bool
    """Whether the session is at its end, and all its FP8 tests came to theirs."""
    problems: Sequence[str]
    """What makes the session fail beside its tests."""
    provenance: Origin

    @property
    def beside(self) -> list[str]:
        """What makes the session fail, or leaves it unfinished, beside the verdicts."""
        found = [*not_finished(self.open_tests, self.finished), *self.problems]
        if self.failed_tests:
            from pytest_fp8.questions.findings import some

            count = len(self.failed_tests)
            found.append(f"{count} test(s) failed with something else than an answer: {some(list(self.failed_tests))}")
        return found


def not_finished(open_tests: Mapping[str, Sequence[str]], finished: bool = True) -> list[str]:
    """That a session ended early, or has not ended, and what it left: the names of cases, some of which have no row.
    Empty for a session that came to its end."""
    count, cases = sum(map(len, open_tests.values())), [case for case, tests in open_tests.items() if tests]
    if cases:
        # It reads the pages of all codes, which no session without an answer needs.
        from pytest_fp8.questions.findings import some

        what = f"{count} test(s) of {len(cases)} case(s) were not run, or not to their end: {some(cases)}"
    elif finished:
        return []
    else:
        what = "all FP8 tests ran, and the session was ended before its end"
    return [f"not finished: {what}"]
