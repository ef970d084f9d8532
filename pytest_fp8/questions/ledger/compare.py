"""Compares the arms' ledgers row by row, and says of each difference that FP8 does not explain what it means. Pure.

A new class of fault needs a row in :data:`pytest_fp8.questions.ledger.rows.ROWS`, not a new check.
"""

from __future__ import annotations

from dataclasses import replace

from pytest_fp8.codes import C, D
from pytest_fp8.questions.findings import SHOWN
from pytest_fp8.questions.ledger.evidence import TwoLedgers
from pytest_fp8.questions.ledger.rows import ROWS, Difference, Explained, gradients_there
from pytest_fp8.verdicts import Decision, Finding, Verdict


def compare(ledgers: TwoLedgers) -> list[Difference]:
    """All differences that FP8 does not explain, in the order of ``ROWS``."""
    explained = Explained(ledgers)
    return [difference for row in ROWS for difference in row(ledgers, explained)]


def find_in_ledger(ledgers: TwoLedgers, question: str) -> Finding | None:
    """The first difference that changes the answer to ``question``, or ``None``."""
    found = [d for d in compare(ledgers) if question in d.questions]
    if not found:
        return None
    first = next((d for d in found if d.verdict is Verdict.FAIL), found[0])
    also = list(dict.fromkeys(d.about for d in found if d.about != first.about))
    more = f" and {len(also) - SHOWN} more" if len(also) > SHOWN else ""
    return replace(
        first,
        expected=f"as in the BF16 arm: {first.expected}",
        seen=first.seen + (f"; other differences: {', '.join(also[:SHOWN])}{more}" if also else ""),
    )


def find_where_gradients_are_missing(ledgers: TwoLedgers, question: str) -> Finding | None:
    """:func:`find_in_ledger` where weights get no gradient in the FP8 arm alone. Their layers then have no gradient
    products, and those of other layers of equal sizes may be taken for them."""
    missing = any(gradients_there(ledgers, Explained(ledgers)))
    return find_in_ledger(ledgers, question) if missing else None


STANDS = frozenset({C.FP8_LOST, C.TOO_EXACT, C.WEIGHTS_STAND_STILL, C.NOT_ANEW})
"""Said before what the ledger finds, which may be a symptom: what leaves FP8, holds weights still or is kept from curve
to curve has work of its own in one arm."""


def unless_unlike(decision: Decision, ledgers: TwoLedgers) -> Decision:
    """``decision``, or in its place what the ledgers say where the arms differ in what its question compares.

    What is INVALID by itself stays so, but for a switch of torch's in one arm: TF32 there makes kernels shorter, which
    would read as less work.
    """
    if decision.code in STANDS:
        return decision
    found = find_in_ledger(ledgers, decision.question)
    if found is None or (decision.verdict is found.verdict is Verdict.INVALID and found.code != D.OTHER_SWITCH):
        return decision
    return found.answer(decision.question, decision.figures)


def blame_in_ledger(decision: Decision, ledgers: TwoLedgers) -> Decision:
    """A numerics ``decision`` that fails: where the arms did not do the same work, that difference is said first."""
    found = find_in_ledger(ledgers, "loss")
    if found is None:
        return decision
    seen = f"{found.seen}; it follows that {decision.headline}: {decision.seen}"
    return replace(found, verdict=decision.verdict, seen=seen).answer(decision.question, decision.figures)


def never_called(ledgers: TwoLedgers) -> list[str]:
    """Converted layers that neither arm calls in training, on any rank."""
    called = {c.module for arm in (ledgers.reference, ledgers.fp8) for calls in arm.of_ranks() for c in calls}
    return [name for name in ledgers.fp8.fp8_layers if name not in called]
