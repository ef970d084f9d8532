"""What a session learned, as a list of lines: answers, facts of cases, ends of tests. All else is computed from them.

A test's lines travel on pytest's own reports (``report.fp8``): the same from a test of this process and from one of
a worker. They are kept in the order in which they came, and appended to a journal, which SIGKILL leaves.
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

from pytest_fp8.plain import from_plain, to_plain
from pytest_fp8.report.rows import Evidence, Row, Said
from pytest_fp8.verdicts import WORST_FIRST, Verdict

if TYPE_CHECKING:
    from pytest_fp8.baselines.review import Revision
    from pytest_fp8.errors import Fp8Error
    from pytest_fp8.verdicts import Decision

JOURNAL = "journal.jsonl"
"""Beside where the report will be: a JSON line each, while tests run."""
NUMBERED = " #"
"""Between a case's id and the number of a further model that was asked under it."""
NO_ANSWER = ("INVALID", "INCONCLUSIVE", "NOT_EXERCISED")
ERROR = "ERROR"
"""In place of a verdict: an arm failed, which ended a question."""
LONGEST_CHAIN = 20
"""Errors that were raised while another one was handled."""


@dataclass(frozen=True)
class Answer:
    """What a test was told about a question."""

    test: str
    case: str
    model: str
    """The digest of what was trained: cases of one name may have several."""
    question: str
    verdict: str
    """Or :data:`ERROR`; empty where the test ended as known before there was an answer."""
    code: str | None = None
    headline: str = ""
    """Of an error with its code."""
    message: str = ""
    numbers: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """What a baseline would store of it: metric -> unit, direction, tolerance, values."""
    asserted: bool = False
    """Whether the test asserted it. One that a test only looked at is its own affair."""
    ended: str = ""
    """``failed`` or, as it was expected to, ``known``: how the test ended with this answer."""

    @property
    def said(self) -> str:
        """The verdict and its code."""
        return f"{self.verdict} {self.code}" if self.code else self.verdict

    @property
    def judged(self) -> bool:
        return self.verdict not in (ERROR, "")

    @property
    def decision(self) -> Said:
        return Said(Verdict(self.verdict), self.code, self.headline, self.message, self.numbers)


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
    model: str
    """Of its first answer; empty without one."""
    outcome: str
    """``passed``, ``failed``, ``skipped``, or ``known``: it failed as it was expected to."""
    reason: str
    """Why it was skipped, or is expected to fail."""
    ran: bool | None
    """Whether it ran, rather than being skipped; ``None`` where it counts among neither."""
    on_gpu: bool
    otherwise: bool
    """Whether it failed with something else than an answer."""


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
    waited: Mapping[str, Any]
    builds: Mapping[str, Any]


@dataclass(frozen=True)
class Began:
    """The first line of a journal: where and with what is measured."""

    provenance: Mapping[str, Any]


Line = Answer | CaseFacts | Ended | Collected | Seconds | Began
KINDS: dict[str, Any] = {kind.__name__: kind for kind in (Answer, CaseFacts, Ended, Collected, Seconds, Began)}


def plain_line(line: Line) -> dict[str, Any]:
    return {"kind": type(line).__name__, **to_plain(line)}


class Record:
    """All lines of a session, and what follows from them."""

    def __init__(self, journal: Path | None = None, began: Callable[[], Began] | None = None) -> None:
        """``journal``: where lines are written once a test has told something. ``began``: gives the first one."""
        self.lines: list[Line] = []
        self.stopped = False
        """Whether the session ended before all that was selected had run."""
        self._journal, self._began, self._written = journal, began, 0

    def add(self, lines: Iterable[Mapping[str, Any]]) -> list[Line]:
        """Add lines as plain data; gives them. Raises ``PlainDataError``."""
        added: list[Line] = [from_plain(KINDS.get(each.pop("kind", ""), Began), each) for each in map(dict, lines)]
        if added:
            self.lines += added
            self.__dict__.pop("entries", None)
            new = self.lines[self._written :]
            if self._journal is not None and (self._written or self.entries):
                self._write(self._journal, new)
        return added

    def _write(self, journal: Path, new: list[Line]) -> None:
        if not self._written and self._began is not None:
            new = [self._began(), *new]
        try:
            with journal.open("a" if self._written else "w", encoding="utf-8") as file:
                file.writelines(json.dumps(plain_line(line), default=str) + "\n" for line in new)
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
        told: dict[tuple[str, str], list[Answer | CaseFacts]] = {}
        for line in self._told():
            told.setdefault((line.case, line.model), []).append(line)
        firsts = dict(reversed(told))
        reasons: dict[tuple[str, str], list[str]] = {}
        for line in self._of(Ended):
            if line.outcome == "known":
                # What failed before its model was known belongs to the case's first.
                model = line.model if (line.case, line.model) in told else firsts.get(line.case, "")
                reasons.setdefault((line.case, model), []).append(line.reason)
        models, seen = Counter(case for case, _ in {**told, **reasons}), Counter[str]()
        rows = []
        for case, model in {**told, **reasons}:
            seen[case] += 1
            row = Row(case if seen[case] == 1 else f"{case}{NUMBERED}{seen[case]}")
            row.expected = list(dict.fromkeys(reasons.get((case, model), ())))
            row.namesakes = models[case] if models[case] > 1 else 0
            row.open_tests = len(self.open_tests.get(case, ()))
            lines = told.get((case, model), [])
            answers = [line for line in lines if isinstance(line, Answer)]
            rows.append(self._folded(row, answers, [line for line in lines if isinstance(line, CaseFacts)]))
        return {row.case: row for row in rows}

    def _folded(self, row: Row, answers: Sequence[Answer], facts: Sequence[CaseFacts]) -> Row:
        """The row with what these lines say."""
        for known in facts:
            row.case_hash, row.gpu = known.case_hash or row.case_hash, known.gpu or row.gpu
            row.timing |= known.timing
            row.evidence = known.evidence or row.evidence
        for each in answers:
            for name, metric in each.metrics.items():
                # Of several tests with tolerances of their own the strictest.
                strictest = min(one["tolerance"] for one in (metric, row.metrics.get(name, metric)))
                row.metrics[name] = {**metric, "tolerance": strictest}
        named = [(each.ended, each.headline if each.verdict == ERROR else each.question) for each in answers]
        row.errors = {each.headline: each.message for each in answers if each.verdict == ERROR}
        row.known, row.failed = (
            list(dict.fromkeys(what for ended, what in named if ended == wanted)) for wanted in ("known", "failed")
        )
        judged = [each for each in answers if each.judged]
        for question in dict.fromkeys(each.question for each in judged):
            mine = [each for each in judged if each.question == question]
            asserted = sorted((each for each in mine if each.asserted), key=lambda one: WORST_FIRST.index(one.verdict))
            worst, without = (asserted or mine[-1:])[0], [each for each in asserted if each.verdict in NO_ANSWER]
            row.decisions[question] = worst.decision
            row.asserted += [question] if asserted else []
            row.unanswered |= {question: without[0].decision} if without and worst.verdict == "FAIL" else {}
        return row

    def _told(self) -> list[Answer | CaseFacts]:
        """Answers and facts, in the order in which their tests were collected."""
        places = {test: place for place, test in enumerate(self.tests)}
        return sorted(
            [line for line in self.lines if isinstance(line, Answer | CaseFacts)],
            key=lambda line: places.get(line.test, len(places)),
        )

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
        return self.stopped or bool(self.open_tests) or any(line.partial for line in self._of(Collected))

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
        """Tests that failed with something else than an answer, unless they passed when they were run again."""
        found: dict[str, None] = {}
        for line in self._of(Ended):
            if line.otherwise:
                found[line.test] = None
            elif line.outcome == "passed":
                found.pop(line.test, None)
        return list(found)

    @property
    def durations(self) -> dict[str, Any]:
        """``elapsed`` seconds; ``waited`` by arm and operation; ``builds`` by arm. Those of workers are added."""
        waited: dict[str, Counter[str]] = {}
        builds: dict[str, list[Any]] = {}
        for line in self._of(Seconds):
            for arm, spent in line.waited.items():
                waited.setdefault(arm, Counter()).update(spent)
            for arm, phases in line.builds.items():
                builds.setdefault(arm, []).extend(phases)
        elapsed = sum(line.elapsed for line in self._of(Seconds))
        return {"elapsed": elapsed, "waited": waited, "builds": builds} if waited else {}

    def row_of(self, answer: Answer) -> Row:
        """The row that an answer is in."""
        models = list(dict.fromkeys(line.model for line in self._told() if line.case == answer.case))
        place = models.index(answer.model)
        return self.entries[f"{answer.case}{NUMBERED}{place + 1}" if place else answer.case]

    def answers(self) -> list[Answer]:
        """How each asserted question ended, row by row. One that fails as a known defect has its missing answer."""
        return [
            Answer("", row.case, "", question, said.verdict, said.code, said.headline)
            for row in self.entries.values()
            for question in row.asserted
            for said in [row.unanswered.get(question, row.decisions[question])]
        ]

    def swallowed(self) -> list[str]:
        """Asserted questions that came out as FAIL, and that no test failed with: each by row and question. Somebody
        caught the exception."""
        return [
            f"{row.case} {question}"
            for row in self.entries.values()
            for question in row.asserted
            if row.decisions[question].verdict == "FAIL" and question not in (*row.failed, *row.known)
        ]


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


def read_journal(path: Path) -> Record:
    """The record in the journal of a session that has not ended. A last line that was cut off is left out. Raises
    ``OSError`` and ``ValueError``."""
    *lines, _ = path.read_text(encoding="utf-8").split("\n")
    record = Record()
    record.add(json.loads(line) for line in lines)
    record.stopped = True
    return record


class Notes:
    """What the running test learns, until one of its reports takes it."""

    def __init__(self) -> None:
        self.test = ""
        self.answers: list[Answer] = []
        """Of the running test, also those that a report has taken."""
        self.timed = False
        """Whether the running test timed its arms."""
        self._taken = 0
        self._facts: dict[tuple[str, str], dict[str, Any]] = {}
        """Case and model -> facts that no report has taken."""
        self._gather: dict[tuple[str, str], Callable[[], Evidence]] = {}

    def begin(self, test: str) -> None:
        self.test, self.answers, self.timed, self._taken = test, [], False, 0

    def of(self, case: str, model: str, case_hash: str = "", gpu: str = "") -> CaseNotes:
        if case_hash:
            self._facts.setdefault((case, model), {}).update(case_hash=case_hash, gpu=gpu)
        return CaseNotes(self, case, model)

    def gathers(self, case: str, model: str, gather: Callable[[], Evidence]) -> None:
        """``gather`` gives the evidence of a case: all that its arms have answered so far."""
        self._gather[case, model] = gather

    def timing(self, case: str, model: str, recording: Mapping[str, Any]) -> None:
        self.timed = True
        self._facts.setdefault((case, model), {})["timing"] = recording

    def failed_with(self, error: BaseException | None, ended: str) -> bool:
        """Note how the test ended with the answer that it raised ``error`` for, or raised another error for; gives
        whether there is one. ``ended``: as :attr:`Answer.ended`."""
        told = _told(error)
        if told is None and ended == "known" and isinstance(error, AssertionError):
            # A test that asserted by itself what it looked at: the only question that came out as FAIL.
            fails = {each.question: each for each in self.answers if each.verdict == "FAIL"}
            told = next(iter(fails.values())) if len(fails) == 1 else None
        if told is None:
            return False
        place = next((index for index, each in enumerate(self.answers) if each is told), -1)
        if place < self._taken:
            # Of an earlier test, or of the set-up, as the error of a fixture that several tests share.
            self.answers.append(replace(told, test=self.test, metrics={}, ended=ended))
        else:
            self.answers[place] = replace(told, ended=ended)
        return True

    def take(self) -> list[dict[str, Any]]:
        """The lines since the last call, as plain data."""
        new = self.answers[self._taken :]
        self._taken = len(self.answers)
        for key in {(each.case, each.model) for each in new} & self._gather.keys():
            self._facts.setdefault(key, {})["evidence"] = self._gather[key]()
        facts: list[Line] = [CaseFacts(self.test, *key, **news) for key, news in self._facts.items()]
        self._facts.clear()
        return [plain_line(line) for line in (*facts, *new)]


def _told(error: BaseException | None) -> Answer | None:
    """The answer that a test failed with: what is raised for one has it as ``told``."""
    for _ in range(LONGEST_CHAIN):
        told = getattr(error, "told", None)
        # Somebody else's error may have one, too.
        if isinstance(told, Answer):
            return told
        error = error and (error.__cause__ or error.__context__)
    return None


@dataclass(frozen=True)
class CaseNotes:
    """Where the pair of a case notes what it answers."""

    notes: Notes
    case: str
    model: str

    def answer(self, question: str, decision: Decision, metrics: Mapping[str, Any] | None = None) -> None:
        """``metrics``: metric -> its values, and the tolerance or ``None`` for the metric's own."""
        from pytest_fp8.baselines.metrics import METRICS

        measured = {
            name: {
                "unit": METRICS[name].unit,
                "direction": METRICS[name].direction,
                "tolerance": METRICS[name].tolerance if tolerance is None else tolerance,
                "values": values,
            }
            for name, (values, tolerance) in (metrics or {}).items()
        }
        code = str(decision.code) if decision.code else None
        said = code, decision.headline, decision.message, decision.numbers, measured
        self.notes.answers.append(self._answer(question, decision.verdict.value, *said))

    def asserted(self, question: str) -> Answer:
        """The test asserted its last answer to this question: it needs one. Gives the answer."""
        answers = self.notes.answers
        place = max(index for index, each in enumerate(answers) if each.question == question)
        answers[place] = replace(answers[place], asserted=True)
        return answers[place]

    def error(self, question: str, error: Fp8Error) -> None:
        """An arm failed, which ended a question; ``told`` of the error is what stands for its answer."""
        error.told = self._answer(question, ERROR, str(error.code), error.first_line, error.message)
        self.notes.answers.append(error.told)

    def unproved(self, question: str) -> Answer:
        """What stands for the answer of a test that ends as known without one: for ``told`` of what it raises."""
        return self._answer(question, "")

    def timed(self, recording: Mapping[str, Any]) -> None:
        """All blocks that were timed so far."""
        self.notes.timing(self.case, self.model, recording)

    def _answer(self, question: str, *said: Any) -> Answer:
        return Answer(self.notes.test, self.case, self.model, question, *said)
