"""What tests failed with: as known, where they were expected to, or not. Noted by test, read by case."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pytest_fp8.baselines.strict import printable
from pytest_fp8.case import QUESTIONS

if TYPE_CHECKING:
    from pytest_fp8.report.ledger import Ledger

LONGEST_CHAIN = 20
"""Errors that were raised while another one was handled."""


def note_failure(ledger: Ledger, case: str, report: Any, error: BaseException | None) -> None:
    """Note with which question, or with which arm's error, a test, its set-up or a subtest failed, and whether it was
    expected to. ``report``: pytest's; ``error``: what was raised."""
    as_known, told = report.skipped and hasattr(report, "wasxfail"), _told(error)
    if as_known and isinstance(error, AssertionError):
        told = told or _looked_at(ledger)
    if as_known and (told or report.when == "call"):
        # Somebody's text: one line of it, without control characters, goes to a terminal and to files.
        ledger.failed_as_expected(case, printable(report.wasxfail.removeprefix("reason: "), 300) or "expected to fail")
    if told and told[0] in ledger.entries and (as_known or report.failed):
        row, what = told
        entry = ledger.entries[row]
        whats = entry.known if as_known else entry.failed
        if what not in whats:
            whats.append(what)
    elif report.failed and report.nodeid not in ledger.failed_tests:
        ledger.failed_tests.append(report.nodeid)
    elif report.passed and report.when == "call" and report.nodeid in ledger.failed_tests:
        # It was run again.
        ledger.failed_tests.remove(report.nodeid)


def _told(error: BaseException | None) -> tuple[str, str] | None:
    """Row and question, or row and headline, of the failure that a test raised or raised another one for: what says
    them has them as ``told``."""
    for _ in range(LONGEST_CHAIN):
        told = getattr(error, "told", None)
        # Somebody else's error may have one, too.
        if isinstance(told, tuple) and len(told) == 2 and all(isinstance(each, str) for each in told):
            return told
        error = error and (error.__cause__ or error.__context__)
    return None


def _looked_at(ledger: Ledger) -> tuple[str, str] | None:
    """The question of a test that asserted by itself what it looked at: the only one that came out as FAIL."""
    fails = [(question, said) for question, said in ledger.recent.items() if said["verdict"] == "FAIL"]
    if len(fails) != 1:
        return None
    question, found = fails[0]
    rows = (row for row, entry in ledger.entries.items() if any(said is found for said in entry.decisions.values()))
    return next(((row, question) for row in rows), None)


def swallowed(ledger: Ledger) -> list[str]:
    """Questions that came out as FAIL where a test asserted them, and of which no test failed: each by case and
    question. Somebody caught the exception."""
    return [
        f"{name} {question}"
        for name, entry in ledger.entries.items()
        for question in entry.asserted
        if entry.decisions[question]["verdict"] == "FAIL" and question not in (*entry.failed, *entry.known)
    ]


def is_known(entry: Mapping[str, Any], what: str) -> bool:
    """Whether all tests that failed with this question, or with this arm's error, were expected to."""
    return what in entry["known"] and what not in entry["failed"]


def known_questions(entry: Mapping[str, Any]) -> list[str]:
    """The questions of a case that fail as known. One without an answer is none: no test can be expected to end so."""
    decisions = entry["decisions"].items()
    return [question for question, said in decisions if said["verdict"] == "FAIL" and is_known(entry, question)]


def not_proved(entry: Mapping[str, Any]) -> list[str]:
    """The questions of a case of which tests ended as known before there was an answer."""
    without = [what for what in entry["known"] if what in (*QUESTIONS, "faster")]
    return [what for what in without if what not in entry["decisions"] and is_known(entry, what)]
