"""The closing table: a row of each case, whatever its decisions hold."""

from __future__ import annotations

import pytest

from pytest_fp8 import Verdict
from pytest_fp8.codes import S
from pytest_fp8.report.cells import cells_of
from pytest_fp8.report.ledger import Entry, Ledger
from pytest_fp8.report.terminal import row
from pytest_fp8.verdicts import Decision

SPEEDUP = 4


def entry_of(question, verdict, **numbers):
    ledger = Ledger()
    ledger.entries["c"] = Entry("c")
    ledger.note(
        "c",
        question,
        Decision(None if verdict is Verdict.PASS else S.NO_BASELINE, verdict, "x", question=question, figures=numbers),
    )
    return ledger.entries["c"]


@pytest.mark.parametrize("question", ["layers", "speedup", "memory", "loss", "numerics"])
@pytest.mark.parametrize("verdict", [Verdict.INVALID, Verdict.INCONCLUSIVE, Verdict.PASS])
def test_a_decision_without_numbers_has_a_row(question, verdict):
    entry = entry_of(question, verdict)
    assert len(row(entry)) == len(cells_of(vars(entry))) == 8


@pytest.mark.parametrize(
    ("question", "verdict", "high", "known", "says"),
    [
        ("speedup", Verdict.PASS, 0.70, ["faster"], "[magenta]0.676x +-0.024 slower, known[/]"),
        ("speedup", Verdict.PASS, 0.70, [], "[magenta]0.676x +-0.024 slower[/]"),
        ("faster", Verdict.FAIL, 0.70, ["faster"], "[magenta]0.676x +-0.024 slower, known[/]"),
        ("faster", Verdict.FAIL, 0.70, [], "[red]0.676x +-0.024 FAIL[/]"),
        ("speedup", Verdict.FAIL, 0.70, ["faster"], "[red]0.676x +-0.024 FAIL[/]"),
        ("speedup", Verdict.INVALID, 0.70, ["faster"], "[yellow]0.676x +-0.024 invalid[/]"),
        ("layers", Verdict.PASS, 0.70, ["faster"], "[magenta]slower, known[/]"),
        ("speedup", Verdict.PASS, 1.02, [], "[green]0.676x +-0.184[/]"),
    ],
)
def test_what_passes_and_is_slower_than_bf16_is_not_green(question, verdict, high, known, says):
    entry = entry_of(question, verdict, speedup=0.676, low=0.652, high=high)
    entry.known += known
    assert row(entry)[SPEEDUP] == says
