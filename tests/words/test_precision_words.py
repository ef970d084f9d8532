"""Every sentence of the precision question."""

from __future__ import annotations

import pytest

from pytest_fp8.codes import P
from pytest_fp8.questions.precision import Switches, check_precision

FOUND = {
    P.NOTHING_READS_IT: Switches("fp8"),
    P.TRAINER_DECIDES: Switches("fp8", arguments="bf16", used="bf16"),
    P.LAUNCHER_DECIDES: Switches("fp8", launched=True, process="no", used="no"),
    P.ENVIRONMENT_DECIDES: Switches("bf16", arguments="", used="bf16"),
    P.PROGRAM_DECIDES: Switches("fp8", "fp8", "", True, "fp8", "bf16"),
}


@pytest.mark.parametrize("code", P, ids=lambda code: code.slug)
def test_words(code, snapshot):
    decision = check_precision(FOUND[code])
    assert decision.code is code, decision.message
    assert decision.message == snapshot
