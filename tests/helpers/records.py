"""Sessions' records: filled as tests fill them, and of invented figures, with everything that the page shows."""

from __future__ import annotations

from dataclasses import replace

from pytest_fp8.baselines.provenance import Origin
from pytest_fp8.errors import Fp8Error
from pytest_fp8.report.record import (
    SCHEMA,
    Began,
    CaseFacts,
    CaseNotes,
    Collected,
    Ended,
    Finished,
    Notes,
    Record,
    Seconds,
    plain_line,
)
from pytest_fp8.report.rows import Answer, Curve, Evidence, Row
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


HOSTILE = "<script>alert(1)</script>\"'&$x_{$ </svg></pre>\x1b[31m{{ 7 * 7 }}"
NAME = "model.layers.0.mlp"
ORIGIN = Origin("2026-11-22", "abc", False, "", {"name": "NVIDIA H200"}, {"torch": "2.11.0"}, "0" * 12)
EVIDENCE = Evidence(
    [Curve(0, [5.0, 4.0, 3.0], [5.0, None, 3.1])],
    {NAME: {"gradient off BF16 (limit)": "0.08 (<0.25)", "fprop": "fp8 28.5 dB (28.6)"}},
)
BLOCKS = {"processes": [{"bf16": [120.0, 121.0, 122.0, 120.0], "fp8": [106.0, 107.0, 106.0, 105.0]}]}


def said(question, verdict="PASS", message="", code=None, **numbers):
    return Answer("t", "c", "m", question, verdict, code, f"{verdict} it is", message or verdict, numbers)


ALL = (
    said("loss", gap=0.001, margin=0.02),
    said("speedup", speedup=1.13, low=1.12, high=1.14, baseline=1.12, account={"limit": 1.3}),
    said("memory", ratio=0.9, phases={"forward": 1.0}),
)


def case_of(name="1b-te-delayed", *answers, gpu="h200", timing=BLOCKS, evidence=EVIDENCE):
    """The lines of a case on a GPU, of which all is known where no answers are given."""
    facts = CaseFacts("t", name, "m", "hash", gpu, timing, evidence)
    return [facts, *(replace(each, case=name) for each in answers or ALL)]


def report_of(*cases, open_tests=(), not_run=(), waited=None, problems=()):
    """The record of these cases. ``open_tests``: case -> tests; ``not_run``: reason -> tests."""
    tests = {f"{case}::{test}": case for case, left in dict(open_tests).items() for test in left}
    lines = [Began(SCHEMA, ORIGIN), Collected(tests, [], False), *(line for case in cases for line in case)]
    lines += [
        Ended(test, "c", "skipped", reason, False, False) for reason, left in dict(not_run).items() for test in left
    ]
    lines += [Seconds(1.0, waited)] if waited else []
    record = Record()
    record.add(map(plain_line, [*lines, Ended("t", "c", "passed", "", True, True), Finished(True, list(problems))]))
    return record


def write_journal(folder, record):
    """As a session writes it; gives the path."""
    journal = folder / "journal.jsonl"
    written = Record(journal, lambda: record.lines[0])
    written.lines = record.lines[1:-1]
    written.finish(True, record.problems)
    return journal
