"""A session's record, filled as tests would fill it."""

from __future__ import annotations

from pytest_fp8.errors import Fp8Error
from pytest_fp8.report.record import CaseFacts, CaseNotes, Collected, Ended, Notes, Record, plain_line
from pytest_fp8.report.rows import Row
from pytest_fp8.verdicts import Decision


class Told(Record):
    """A record of tests that each tell one thing."""

    def __init__(self) -> None:
        super().__init__()
        self.notes = Notes()

    def answer(
        self,
        case: str,
        decision: Decision,
        asserted: bool = False,
        model: str = "a model",
        question: str = "",
        **metrics,
    ) -> Row:
        """An answer of the running test; gives its row. ``metrics``: values of each."""
        notes = CaseNotes(self.notes, case, model)
        question = question or decision.question
        notes.answer(question, decision, {name: (values, None) for name, values in metrics.items()})
        if asserted:
            notes.asserted(question)
        self.add(self.notes.take())
        return next(row for row in self.entries.values() if self.notes.answers[-1] in row.answers)

    def error(self, case: str, error: Fp8Error, model: str = "a model") -> None:
        CaseNotes(self.notes, case, model).error("numerics", error)
        self.add(self.notes.take())

    def to_lines(self) -> list[dict[str, object]]:
        return [plain_line(line) for line in self.lines]

    def case(self, case: str, model: str = "a model", **facts) -> None:
        """Facts of a case, without an answer."""
        self.add([plain_line(CaseFacts("", case, model, **facts))])

    def ended(self, test: str, case: str, outcome: str = "passed", reason: str = "", ran: bool = True) -> None:
        self.add([plain_line(Ended(test, case, outcome, reason, ran, on_gpu=True))])

    def collected(self, tests: dict[str, str], partial: bool = False) -> None:
        self.add([plain_line(Collected(tests, sorted(set(tests.values())), partial))])
