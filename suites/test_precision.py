"""Which setting decides the precision? Asked of Accelerate and the Trainer themselves, on any machine."""

from importlib.util import find_spec

import pytest

from pytest_fp8 import Verdict
from pytest_fp8.checks.precision import check_precision, winner

CONFIG = """
compute_environment: LOCAL_MACHINE
distributed_type: 'NO'
mixed_precision: fp8
num_processes: 1
use_cpu: true
fp8_config:
  backend: AO
"""


@pytest.fixture(scope="module")
def resolved(tmp_path_factory):
    """Both roads at once, each a process: the environment alone, and a config file through ``accelerate launch``."""
    for package in ("torchao", "accelerate"):
        # Not imported here: that is the arms' business.
        if find_spec(package) is None:
            pytest.skip(f"needs {package}: pip install {package}")
    from concurrent.futures import ThreadPoolExecutor

    from pytest_fp8.resolve import resolve

    file = tmp_path_factory.mktemp("accelerate") / "fp8.yaml"
    file.write_text(CONFIG)
    with ThreadPoolExecutor() as pool:
        asked = {"environment": pool.submit(resolve, "fp8"), "file": pool.submit(resolve, "", file)}
        return {(road, s.arguments): s for road, answers in asked.items() for s in answers.result()}


@pytest.mark.parametrize(("road", "by"), [("environment", "ACCELERATE_MIXED_PRECISION"), ("file", "config file")])
def test_fp8_from_outside_reaches_a_trainer_that_asks_for_nothing(resolved, road, by):
    decision = check_precision(resolved[road, ""])
    assert decision.verdict is Verdict.PASS, decision.message
    assert by in decision.headline
    assert resolved[road, ""].backend == "AO", "both libraries or torchao alone: Accelerate takes torchao"


@pytest.mark.parametrize("road", ["environment", "file"])
def test_what_wins_over_fp8_is_named(resolved, road):
    """The Trainer's bf16=True does, today; a release where it does not passes too, by the setting that it names."""
    switches = resolved[road, "bf16"]
    decision = check_precision(switches)
    assert winner(switches) in decision.message
    assert (decision.verdict is Verdict.PASS) == (switches.used == "fp8")
