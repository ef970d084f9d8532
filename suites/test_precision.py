"""Which setting decides the precision? Asked of Accelerate and the Trainer themselves, on any machine."""

import pytest

from pytest_fp8 import Verdict
from pytest_fp8.questions.precision import check_precision, winner


@pytest.mark.parametrize(("road", "by"), [("environment", "ACCELERATE_MIXED_PRECISION"), ("file", "config file")])
def test_fp8_from_outside_reaches_a_trainer_that_asks_for_nothing(resolved, road, by):
    switches = resolved(road, "")
    decision = check_precision(switches)
    assert decision.verdict is Verdict.PASS, decision.message
    assert by in decision.headline
    assert switches.backend == "AO", "both libraries or torchao alone: Accelerate takes torchao"


@pytest.mark.parametrize("road", ["environment", "file"])
def test_what_wins_over_fp8_is_named(resolved, road):
    """The Trainer's bf16=True does, today; a release where it does not passes too, by the setting that it names."""
    switches = resolved(road, "bf16")
    decision = check_precision(switches)
    assert winner(switches) in decision.message
    assert (decision.verdict is Verdict.PASS) == (switches.used == "fp8")
