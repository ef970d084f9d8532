"""What a session learned, case by case: decisions, measurements, what did not run. Plain data that xdist can send."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pytest_fp8.plain import from_plain, to_plain
from pytest_fp8.report.durations import added
from pytest_fp8.verdicts import WORST_FIRST

if TYPE_CHECKING:
    from pytest_fp8.errors import Fp8Error
    from pytest_fp8.rules.undecided import Answer
    from pytest_fp8.verdicts import Decision


NUMBERED = " #"
"""Between a case's id and the number of a further model that was asked under it."""
NO_ANSWER = ("INVALID", "INCONCLUSIVE", "NOT_EXERCISED")


@dataclass
class Entry:
    """One case: its decisions by question (verdict, code, headline, numbers) and its measurements by metric."""

    case: str
    case_hash: str = ""
    gpu: str = ""
    decisions: dict[str, dict[str, Any]] = field(default_factory=dict)
    metrics: dict[str, dict[str, Any]] = field(default_factory=dict)
    timing: dict[str, Any] = field(default_factory=dict)
    """Every timed block: ``processes`` of ``bf16`` and ``fp8``, milliseconds per step, and how they were taken."""
    errors: list[str] = field(default_factory=list)
    """Code and headline of errors that ended a question without a decision."""
    expected: list[str] = field(default_factory=list)
    """Why tests of this case were expected to fail, and did: a library's known defect."""
    known: list[str] = field(default_factory=list)
    """Questions, and first lines of errors, that such tests failed with."""
    failed: list[str] = field(default_factory=list)
    """The same of tests that were not expected to fail."""
    asserted: list[str] = field(default_factory=list)
    """Questions that a test asserted, as ``decisions`` names them. One that a test only looked at is its own affair."""
    namesakes: int = 0
    """Number of distinct workloads under one case id; 0 where there is one."""
    evidence: dict[str, Any] = field(default_factory=dict)
    """What pictures show; see ``report/evidence.py``. Gathered where a report is written."""
    open_tests: int = 0
    """Its tests that were not run, or not to their end; counted where the ledger becomes plain data."""
    unanswered: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Asserted question -> its worst answer that is none, where ``decisions`` has the FAIL of another test, which may
    be known."""

    def keep(self, question: str, said: dict[str, Any]) -> None:
        """Of the answers to several tests that assert a question, and may ask for another floor or other checkpoints,
        the worst is kept."""
        held = [self.decisions[question]] if question in self.asserted else []
        held += [self.unanswered[question]] if question in self.unanswered else []
        said, *others = sorted([*held, said], key=lambda one: WORST_FIRST.index(one["verdict"]))
        self.decisions[question] = said
        without = [one for one in others if one["verdict"] in NO_ANSWER]
        if said["verdict"] == "FAIL" and without:
            self.unanswered[question] = without[0]


@dataclass
class Ledger:
    """All cases of a session, in the order they were asked."""

    entries: dict[str, Entry] = field(default_factory=dict)
    not_run: dict[str, list[str]] = field(default_factory=dict)
    """Reason -> FP8 tests that did not run."""
    ran: int = 0
    """FP8 tests that ran, on a GPU or without one."""
    ran_on_gpu: int = 0
    """Those that asked a question of a GPU."""
    collected: list[str] = field(default_factory=list)
    """Names under which baselines of the collected cases may be stored."""
    partial: bool = False
    """Whether a part of the suite was not selected: by a path, ``-k`` or ``-m``, or by an early stop."""
    durations: dict[str, Any] = field(default_factory=dict)
    """Where the arms' time went; see ``report/durations.py``."""
    open_tests: dict[str, list[str]] | None = None
    """Case -> collected tests that have not finished; ``None`` before collection."""
    failed_tests: list[str] = field(default_factory=list)
    """Tests that failed with something else than a question or an arm's error."""
    recent: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Question -> decision since :meth:`taken` was last asked."""
    _rows: dict[str, dict[str, str]] = field(default_factory=dict)
    """Case -> workload -> name of its entry."""
    _gather: dict[str, Callable[[], dict[str, Any]]] = field(default_factory=dict)
    """Entry -> what gives its evidence."""
    _outdated: set[str] = field(default_factory=set)
    """Entries with an answer that came after their evidence was gathered."""

    def taken(self) -> dict[str, dict[str, Any]]:
        """The decisions noted since the last call: those of the test that just ran."""
        decisions, self.recent = self.recent, {}
        return decisions

    def row(self, case: str, workload: str) -> str:
        """The name of the entry of a case with this workload: the case's id, with a number for each further one."""
        rows = self._rows.setdefault(case, {})
        if workload not in rows:
            rows[workload] = f"{case}{NUMBERED}{len(rows) + 1}" if rows else case
            self.entries.setdefault(rows[workload], Entry(rows[workload]))
            self._count_namesakes()
        return rows[workload]

    def begin(self, row: str, case_hash: str, gpu: str) -> None:
        """A pair of arms is there: the hash of its definition, and the GPU's folder of baselines."""
        self.entries[row].case_hash, self.entries[row].gpu = case_hash, gpu

    def note(self, case: str, question: str, decision: Decision) -> None:
        """Keeps the last decision on a question, until a test asserts it."""
        self._outdated.add(case)
        self.recent[question] = {
            "verdict": decision.verdict.value,
            "code": str(decision.code) if decision.code else None,
            "headline": decision.headline,
            "message": decision.message,
            "numbers": decision.numbers,
        }
        entry = self.entries.setdefault(case, Entry(case))
        if question not in entry.asserted:
            entry.decisions[question] = self.recent[question]

    def asserted(self, case: str, question: str) -> None:
        """A test asserted this question: it needs an answer."""
        entry = self.entries[case]
        entry.keep(question, self.recent[question])
        if question not in entry.asserted:
            entry.asserted.append(question)

    def answers(self) -> list[Answer]:
        """How each asserted question ended, case by case. A case that fails as a known defect is not among them."""
        from pytest_fp8.rules.undecided import Answer

        return [
            Answer(entry.case, question, decision["verdict"], decision["headline"], decision["code"])
            for entry in self.entries.values()
            for question in entry.asserted
            for decision in [entry.unanswered.get(question, entry.decisions[question])]
        ]

    def measure(self, case: str, metric: str, values: list[Any], tolerance: float | None = None) -> None:
        """``tolerance``: the case's own; ``None``: the metric's."""
        from pytest_fp8.baselines.metrics import METRICS

        known, metrics = METRICS[metric], self.entries.setdefault(case, Entry(case)).metrics
        asked = known.tolerance if tolerance is None else tolerance
        metrics[metric] = {
            "unit": known.unit,
            "direction": known.direction,
            # Of several tests with tolerances of their own the strictest.
            "tolerance": min(asked, metrics.get(metric, {}).get("tolerance", asked)),
            "values": values,
        }

    def timed(self, case: str, recording: dict[str, Any]) -> None:
        self.entries.setdefault(case, Entry(case)).timing = recording

    def error(self, case: str, error: Fp8Error) -> None:
        """An arm failed, which ended a question; the error is told where."""
        error.told = case, error.first_line
        self.entries.setdefault(case, Entry(case)).errors.append(error.first_line)

    def failed_as_expected(self, case: str, reason: str) -> None:
        reasons = self.entries.setdefault(case, Entry(case)).expected
        if reason not in reasons:
            reasons.append(reason)

    @property
    def cut_short(self) -> bool:
        """Whether a collected test has not finished."""
        return any((self.open_tests or {}).values())

    def finished(self, case: str, test: str) -> None:
        """A test of this case was skipped, failed or passed."""
        tests = (self.open_tests or {}).get(case, [])
        if test in tests:
            tests.remove(test)

    def ended(self, case: str, test: str, report: Any, on_gpu: bool) -> None:
        """A test came to its end, in its set-up or its call: it ran, or was skipped, whoever skipped it. One that is
        expected to fail ran where it asked its arms something."""
        if any(test in tests for tests in self.not_run.values()):
            return
        row, expected = self.entries.get(case), hasattr(report, "wasxfail")
        if not report.skipped or (row is not None and (row.decisions or row.errors or (row.timing and expected))):
            self.ran += 1
            self.ran_on_gpu += on_gpu
        elif expected:
            self.skipped(test, report.wasxfail.removeprefix("reason: ") or "expected to fail")
        else:
            told = report.longrepr
            self.skipped(test, str(told[2] if isinstance(told, tuple) else told).removeprefix("Skipped: "))

    def skipped(self, test: str, reason: str) -> None:
        self.not_run.setdefault(reason, []).append(test)

    def gathers(self, case: str, gather: Callable[[], dict[str, Any]]) -> None:
        """``gather`` gives the evidence of an entry: all that its arms have answered so far."""
        self._gather[case] = gather

    def to_json(self) -> dict[str, Any]:
        for case in self._outdated & self._gather.keys():
            self.entries[case].evidence = self._gather[case]()
        self._outdated.clear()
        still_open = {case: tests for case, tests in (self.open_tests or {}).items() if tests}
        for entry in self.entries.values():
            entry.open_tests = len(still_open.get(entry.case.partition(NUMBERED)[0], ()))
        return {
            "entries": to_plain(self.entries),
            "not_run": self.not_run,
            "ran": self.ran,
            "ran_on_gpu": self.ran_on_gpu,
            "collected": self.collected,
            "partial": self.partial,
            "durations": self.durations,
            "failed_tests": self.failed_tests,
            "open_tests": None if self.open_tests is None else still_open,
        }

    def merge(self, data: Mapping[str, Any]) -> None:
        """Add what an xdist worker learned: its :meth:`to_json`. Raises ``PlainDataError`` where a key is missing."""
        taken: set[str] = set()
        # Those with a hash first: an error before the arms were there takes a row that is left.
        for fields in sorted(data["entries"].values(), key=lambda fields: not fields["case_hash"]):
            theirs = from_plain(Entry, fields)
            row = self._row_of(theirs, taken)
            taken.add(row)
            entry = self.entries.setdefault(row, Entry(row))
            if theirs.case_hash:
                entry.case_hash, entry.gpu = theirs.case_hash, theirs.gpu
            entry.decisions |= {q: said for q, said in theirs.decisions.items() if q not in entry.asserted}
            for question in theirs.asserted:
                entry.keep(question, theirs.decisions[question])
                entry.asserted += [question] if question not in entry.asserted else []
            for question, said in theirs.unanswered.items():
                entry.keep(question, said)
            entry.metrics.update(theirs.metrics)
            entry.timing.update(theirs.timing)
            entry.errors.extend(theirs.errors)
            for mine, more in (
                (entry.expected, theirs.expected),
                (entry.known, theirs.known),
                (entry.failed, theirs.failed),
            ):
                mine.extend(each for each in more if each not in mine)
            entry.evidence.update(theirs.evidence)
        self._count_namesakes()
        # By name: which worker has which cases, and which ends first, is chance.
        self.entries = dict(sorted(self.entries.items()))
        for reason, tests in data["not_run"].items():
            self.not_run.setdefault(reason, []).extend(tests)
        self.ran += data["ran"]
        self.ran_on_gpu += data["ran_on_gpu"]
        self.failed_tests += [test for test in data["failed_tests"] if test not in self.failed_tests]
        self.collected = sorted({*self.collected, *data["collected"]})
        self.partial |= data["partial"]
        if self.open_tests is None:
            self.open_tests = data["open_tests"]
        elif data["open_tests"] is not None:
            # Each worker collects all tests and runs some. A test is open where no worker ran it; a worker's list
            # leaves out cases without open tests.
            still_open = data["open_tests"]
            self.open_tests = {
                case: [test for test in tests if test in still_open.get(case, ())]
                for case, tests in self.open_tests.items()
            }
        self.durations = added(self.durations, data["durations"])

    def _row_of(self, theirs: Entry, taken: set[str]) -> str:
        """The row that another process's entry belongs to. Each process numbers the models of one case as they come:
        rows are the same where the hash of the case is. An error before the arms were there has none. ``taken``: rows
        of that process's other entries."""
        base = theirs.case.partition(NUMBERED)[0]
        rows = [theirs.case, base, *(f"{base}{NUMBERED}{number}" for number in range(2, len(self.entries) + 3))]
        free = [row for row in rows if row not in taken]
        held = {row: self.entries[row].case_hash for row in free if row in self.entries}
        alike = (row for row in free if held.get(row) == theirs.case_hash)
        unknown = (row for row in free if row not in held or "" in (held[row], theirs.case_hash))
        return next(alike, "") or next(unknown)

    def _count_namesakes(self) -> None:
        names = Counter(row.partition(NUMBERED)[0] for row in self.entries)
        for row, entry in self.entries.items():
            count = names[row.partition(NUMBERED)[0]]
            entry.namesakes = count if count > 1 else 0
