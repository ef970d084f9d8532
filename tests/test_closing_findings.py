"""What is said at the end of a run of decisions that neither passed nor failed."""

from __future__ import annotations

from helpers.evidence import CASE
from pytest_fp8.report.ledger import Ledger
from pytest_fp8.report.terminal import findings
from pytest_fp8.verdicts import Decision, Verdict


def test_what_several_questions_share_is_said_once_with_their_names():
    ledger = Ledger()
    row = ledger.begin(CASE, "", "")
    for question in ("layers", "loss"):
        ledger.note(row, question, Decision(question, Verdict.INVALID, "the arms draw other random numbers"))
    ledger.note(row, "numerics", Decision("numerics", Verdict.INCONCLUSIVE, "too sensitive"))
    ledger.note(row, "memory", Decision("memory", Verdict.PASS, "0.9x"))
    assert findings(ledger) == [
        f"{row} layers, loss: INVALID: the arms draw other random numbers",
        f"{row} numerics: INCONCLUSIVE: too sensitive",
    ]
