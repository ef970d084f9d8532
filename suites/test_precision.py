"""Which setting decides the precision? Asked of Accelerate and the Trainer themselves, on any machine."""

import pytest

from pytest_fp8 import Verdict
from pytest_fp8.questions.precision import check_precision, winner

FILE = pytest.mark.nightly  # a launch more; tests/test_precision.py has the rows of the check


@pytest.mark.parametrize(
    ("way", "by"),
    [("environment", "ACCELERATE_MIXED_PRECISION"), pytest.param("file", "config file", marks=FILE)],
)
def test_fp8_from_outside_reaches_a_trainer_that_asks_for_nothing(resolved, way, by):
    switches = resolved(way, "")
    decision = check_precision(switches)
    assert decision.verdict is Verdict.PASS, decision.message
    assert by in decision.headline
    assert switches.backend == "AO", "both libraries or torchao alone: Accelerate takes torchao"


@pytest.mark.parametrize("way", ["environment", pytest.param("file", marks=FILE)])
def test_what_wins_over_fp8_is_named(resolved, way):
    """Today bf16=True of the Trainer wins. A release in which fp8 wins passes, too, where the message names fp8's."""
    switches = resolved(way, "bf16")
    decision = check_precision(switches)
    assert winner(switches) in decision.message
    assert (decision.verdict is Verdict.PASS) == (switches.used == "fp8")
