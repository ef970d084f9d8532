"""Every sentence about arms that differ in more than FP8, from ledgers written by hand."""

from __future__ import annotations

import pytest

from helpers.two_ledgers import DIFFERENCES, HEALTHY, arm_ledger, ledgers
from pytest_fp8.codes import D
from pytest_fp8.questions.ledger.compare import find_in_ledger

SETTINGS = ({"": {"native_dropout bfloat16 0.1": 1}}, {"": {"native_dropout bfloat16 0.2": 1}})
FOUND = {code: ledgers(**changes) for changes, code, _ in reversed(DIFFERENCES) if code in set(D)} | {
    D.OTHER_OPERATOR_SETTING: ledgers(
        reference=arm_ledger(operators={**HEALTHY.operators, **SETTINGS[0]}),
        operators={**HEALTHY.operators, **SETTINGS[1]},
    )
}
"""Code -> ledgers that it is found in."""


@pytest.mark.parametrize("code", FOUND, ids=lambda code: code.slug)
def test_words(code, snapshot):
    found = find_in_ledger(FOUND[code], "loss") or find_in_ledger(FOUND[code], "speedup")
    assert found.code is code, found.message
    assert found.message == snapshot


def test_every_code_of_the_ledger_has_its_words_here():
    assert {code for code in D if code < D.OTHER_STEPS} == set(FOUND), "those from there on are found in curves"
