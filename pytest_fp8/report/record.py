"""What a session learned, as a list of lines: answers, facts of cases, ends of tests. All else is computed from them.

A test's lines travel on pytest's own reports (``report.fp8``): the same from a test of this process and from one of
a worker. They are kept in the order in which they came, and appended to a journal, which SIGKILL leaves and from which
reports are read.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_fp8.baselines.provenance import Origin
from pytest_fp8.plain import finite, from_plain, to_plain
from pytest_fp8.questions.findings import some
from pytest_fp8.report.rows import ERROR, FAILS, Answer, Evidence, Row

if TYPE_CHECKING:
    from pytest_fp8.baselines.review import Revision
    from pytest_fp8.errors import Fp8Error
    from pytest_fp8.verdicts import Decision

JOURNAL = "journal.jsonl"
"""In the report's folder: a JSON line each."""
WRITTEN = REPORT, SUMMARY, PAGE = "report.json", "summary.md", "index.html"
"""Beside it, at the end of a run."""
SCHEMA = 5
"""The number of what the journal and ``report.json`` hold; it grows where a field that readers use changes its meaning
or goes."""


@dataclass(frozen=True)
class Began:
    """The first line of a journal."""

    schema: int
    provenance: Origin


@dataclass(frozen=True)
class CaseFacts:
    """What is known of a case and its model beside answers; empty fields say nothing new."""

    test: str
    case: str
    model: str
    case_hash: str = ""
    gpu: str = ""
    """The folder of its baselines."""
    timing: Mapping[str, Any] = field(default_factory=dict)
    """Every timed block so far: ``processes`` of ``bf16`` and ``fp8``, milliseconds a step, and how they were taken."""
    evidence: Evidence | None = None


@dataclass(frozen=True)
class Ended:
    """A test's call came to an end, or its set-up or tear-down did otherwise than by passing."""

    test: str
    case: str
    outcome: str
    """``passed``, ``failed``, ``skipped``, or ``known``: it failed as it was expected to."""
    reason: str
    """Why it was skipped, or is expected to fail."""
    ran: bool | None
    """Whether it ran, rather than being skipped; ``None`` where it counts among neither."""
    on_gpu: bool


@dataclass(frozen=True)
class Collected:
    """What a process collected."""

    tests: Mapping[str, str]
    """Test -> its case, in the order in which they run."""
    stored: Sequence[str]
    """Names under which baselines of these cases may be stored."""
    partial: bool
    """Whether a part of the suite was not selected, by a path, ``-k`` or ``-m``."""


@dataclass(frozen=True)
class Seconds:
    """Where the time of the arms went during a test, as :meth:`Stopwatch.take` gives it."""

    elapsed: float
    waited: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Finished:
    """The last line of a session that came to its end."""

    whole: bool
    """Whether all its FP8 tests came to theirs."""
    problems: Sequence[str]
    """What makes the session fail beside its tests."""


Line = Began | Answer | CaseFacts | Ended | Collected | Seconds | Finished
KINDS: dict[str, Any] = {
    kind.__name__: kind for kind in (Began, Answer, CaseFacts, Ended, Collected, Seconds, Finished)
}


def plain_line(line: Line) -> dict[str, Any]:
    return {"kind": type(line).__name__, **to_plain(line)}


class Record:
    """All lines of a session, and what follows from them."""

    def __init__(self, journal: Path | None = None, began: Callable[[], Began] | None = None) -> None:
        """``journal``: where lines are written from the first one on; the files of the run before go then. ``began``:
        gives the first one."""
        self.lines: list[Line] = []
        self._journal, self._began, self._written = journal, began, 0

    def add(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Add lines as plain data. Raises ``PlainDataError``."""
        added: list[Line] = [from_plain(KINDS.get(each.pop("kind", ""), Began), each) for each in map(dict, lines)]
        self.lines += added
        self.__dict__.pop("entries", None)
        if added and self._journal is not None:
            self._write()

    def finish(self, whole: bool, problems: Sequence[str]) -> None:
        """The session is at its end. Also one in which nothing was answered has a journal then."""
        self.lines.append(Finished(whole, problems))
        self._write()

    def _write(self) -> None:
        if not self._written and self._began is not None:
            self.lines.insert(0, self._began())
        if self._journal is None:
            return
        try:
            if not self._written:
                # Where this run is killed, they would pass for its own.
                for name in WRITTEN:
                    self._journal.with_name(name).unlink(missing_ok=True)
            with self._journal.open("a" if self._written else "w", encoding="utf-8") as file:
                for line in self.lines[self._written :]:
                    file.write(json.dumps(finite(plain_line(line)), default=str) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            # The report at the end of the session says what is wrong with its folder.
            self._journal = None
        self._written = len(self.lines)

    # -- folds ----------------------------------------------------------------------------------------------------

    @cached_property
    def entries(self) -> dict[str, Row]:
        """Name -> row, in the order in which tests were collected: which worker has which cases, and which ends first,
        is chance. A further model under one case id is numbered."""
        places = {test: place for place, test in enumerate(self.tests)}
        about = [line for line in self.lines if isinstance(line, Answer | CaseFacts)]
        told: dict[tuple[str, str], list[Answer | CaseFacts]] = {}
        for line in sorted(about, key=lambda line: places.get(line.test, len(places))):
            told.setdefault((line.case, line.model), []).append(line)
        outcomes: dict[str, list[str]] = {}
        for ended in self._of(Ended):
            outcomes.setdefault(ended.test, []).append(ended.outcome)
        known = {line.test: line.reason for line in self._of(Ended) if {*outcomes[line.test]} - {"passed"} == {"known"}}
        models, numbers, open_tests = Counter(case for case, _ in told), Counter[str](), self.open_tests
        rows: dict[str, Row] = {}
        for (case, _), lines in told.items():
            numbers[case] += 1
            name = f"{case} #{numbers[case]}" if numbers[case] > 1 else case
            answers = [line for line in lines if isinstance(line, Answer)]
            answers = [replace(line, known=line.verdict in FAILS and line.test in known) for line in answers]
            row = rows[name] = Row(name, answers, outcomes)
            row.expected = list(dict.fromkeys(known[line.test] for line in lines if line.test in known))
            row.namesakes = models[case] if models[case] > 1 else 0
            row.open_tests = len(open_tests.get(case, ()))
            for facts in (line for line in lines if isinstance(line, CaseFacts)):
                row.case_hash, row.gpu = facts.case_hash or row.case_hash, facts.gpu or row.gpu
                row.timing = facts.timing or row.timing
                if facts.evidence is not None:
                    # Of tests in several processes each knows what it was told.
                    before = row.evidence or Evidence()
                    row.evidence = Evidence(
                        facts.evidence.curves or before.curves, facts.evidence.layers or before.layers
                    )
        return rows

    def _of(self, kind: type[Any]) -> list[Any]:
        return [line for line in self.lines if isinstance(line, kind)]

    @property
    def tests(self) -> dict[str, str]:
        """Collected test -> its case."""
        return {test: case for line in self._of(Collected) for test, case in line.tests.items()}

    @property
    def open_tests(self) -> dict[str, list[str]]:
        """Case -> collected tests that were not run, or not to their end."""
        ended, found = {line.test for line in self._of(Ended)}, dict[str, list[str]]()
        for test, case in self.tests.items():
            if test not in ended:
                found.setdefault(case, []).append(test)
        return found

    @property
    def collected(self) -> list[str]:
        return sorted({name for line in self._of(Collected) for name in line.stored})

    @property
    def partial(self) -> bool:
        """Also where no test of a case was collected, as of a suite's controls alone."""
        whole = [not line.partial for line in self._of(Collected)]
        return bool(self.open_tests) or not whole or not all(whole)

    def _counted(self) -> list[Ended]:
        """How each test that counts ended, when it was run last."""
        return list({line.test: line for line in self._of(Ended) if line.ran is not None}.values())

    @property
    def ran(self) -> int:
        return sum(bool(line.ran) for line in self._counted())

    @property
    def ran_on_gpu(self) -> int:
        return sum(bool(line.ran) and line.on_gpu for line in self._counted())

    @property
    def not_run(self) -> dict[str, list[str]]:
        """Reason -> tests."""
        found: dict[str, list[str]] = {}
        for line in self._counted():
            if not line.ran:
                found.setdefault(line.reason, []).append(line.test)
        return found

    @property
    def failed_tests(self) -> list[str]:
        """Tests of a case that failed though all that they were told passes, unless they passed when they were run
        again."""
        last = {line.test: line for line in self._of(Ended) if line.case}
        told = {line.test for line in self._of(Answer) if not line.passes}
        return [test for test, line in last.items() if line.outcome == "failed" and test not in told]

    @property
    def durations(self) -> dict[str, Any]:
        """``elapsed`` seconds; ``waited`` by arm and operation. Those of workers are added."""
        waited: dict[str, Counter[str]] = {}
        for line in self._of(Seconds):
            for arm, spent in line.waited.items():
                waited.setdefault(arm, Counter()).update(spent)
        return {"elapsed": sum(line.elapsed for line in self._of(Seconds)), "waited": waited} if waited else {}

    def asserted(self) -> list[Answer]:
        """How each asserted question ended, row by row."""
        return [replace(each, case=row.case) for row in self.entries.values() for each in row.asserted()]

    def swallowed(self) -> list[str]:
        """Asserted questions that came out as FAIL in tests that passed: each by row and question."""
        found = (f"{row.case} {question}" for row in self.entries.values() for question in row.swallowed())
        return list(dict.fromkeys(found))

    # -- where it was measured, and how it ended ------------------------------------------------------------------

    @property
    def provenance(self) -> Origin:
        """Of a session with a journal."""
        began: Began = self._of(Began)[0]
        return began.provenance

    @property
    def finished(self) -> bool:
        """Whether the session is at its end, and all its FP8 tests came to theirs."""
        return any(line.whole for line in self._of(Finished))

    @property
    def problems(self) -> list[str]:
        return [problem for line in self._of(Finished) for problem in line.problems]

    @property
    def left(self) -> list[str]:
        """That tests were not run, or not to their end, in a line; of cases some of which have no row."""
        if not (found := self.open_tests):
            return []
        count = sum(map(len, found.values()))
        tests = f"{count} test(s) of {len(found)} case(s) were not run, or not to their end"
        return [f"not finished: {tests}: {some(list(found))}"]

    @property
    def beside(self) -> list[str]:
        """What makes the session fail, or leaves it unfinished, beside the verdicts."""
        ended = [] if self.finished else ["not finished: all FP8 tests ran, and the session was ended before its end"]
        failed = self.failed_tests
        other = f"{len(failed)} test(s) failed with something else than an answer: {some(failed)}"
        return [*(self.left or ended), *self.problems, *([other] if failed else [])]


@dataclass
class Closing:
    """What a session says at its end, beside its record."""

    problems: list[str] = field(default_factory=list)
    """What made the session fail although no test did."""
    notes: list[str] = field(default_factory=list)
    """What a person should read; no failure."""
    written: list[str] = field(default_factory=list)
    """Paths of the files that the session wrote."""
    revisions: list[Revision] = field(default_factory=list)
    """What an update found, case by case, changed or not."""

    def __bool__(self) -> bool:
        return bool(self.problems or self.notes or self.written)


class Notes:
    """What the running test learns, until one of its reports takes it."""

    def __init__(self) -> None:
        self.test = ""
        self.answers: list[Answer] = []
        """Of the running test, also those that a report has taken."""
        self._taken = 0
        self.facts: dict[tuple[str, str], dict[str, Any]] = {}
        """Case and model -> fields of :class:`CaseFacts` that no report has taken."""

    def begin(self, test: str) -> None:
        self.test, self.answers, self._taken = test, [], 0

    def take(self) -> list[dict[str, Any]]:
        """The lines since the last call, as plain data."""
        facts: list[Line] = [CaseFacts(self.test, *key, **fields) for key, fields in self.facts.items()]
        new = self.answers[self._taken :]
        self._taken = len(self.answers)
        self.facts.clear()
        return [plain_line(line) for line in (*facts, *new)]


@dataclass
class CaseNotes:
    """Where the pair of a case notes what it answers."""

    notes: Notes
    case: str
    model: str
    gather: Callable[[], Evidence] | None = None
    """Gives the evidence of the case: all that its arms have answered so far."""
    _gathered: Evidence | None = None

    def facts(self, **fields: Any) -> None:
        """News of the case, as fields of :class:`CaseFacts`."""
        self.notes.facts.setdefault((self.case, self.model), {}).update(fields)

    def answer(self, question: str, decision: Decision, metrics: Mapping[str, Any] | None = None) -> None:
        """``metrics``: metric -> its values, and the tolerance or ``None`` for the metric's own."""
        from pytest_fp8.baselines.metrics import METRICS

        measured = {
            name: {"tolerance": METRICS[name].tolerance if tolerance is None else tolerance, "values": values}
            for name, (values, tolerance) in (metrics or {}).items()
        }
        code = str(decision.code) if decision.code else None
        self._add(
            question, decision.verdict.value, code, decision.headline, decision.message, decision.numbers, measured
        )

    def asserted(self, question: str) -> None:
        """The test asserted its last answer to this question: it needs one."""
        answers = self.notes.answers
        place = max(index for index, each in enumerate(answers) if each.question == question)
        answers[place] = replace(answers[place], asserted=True)

    def error(self, question: str, error: Fp8Error) -> None:
        """An arm failed, which ended a question."""
        self._add(question, ERROR, str(error.code), error.first_line, error.message)

    def _add(self, question: str, *said: Any) -> None:
        self.notes.answers.append(Answer(self.notes.test, self.case, self.model, question, *said))
        if self.gather is not None and (evidence := self.gather()) != self._gathered:
            self._gathered = evidence
            self.facts(evidence=evidence)
