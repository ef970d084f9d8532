"""Tests that ask nothing are warned about, and fail under ``--fp8-strict``."""

import pytest

CONFTEST = """
from types import SimpleNamespace

import pytest
from pytest_fp8.pair import Fp8Pair
from pytest_fp8.report.record import Notes
from pytest_fp8.verdicts import passed

class Pair(Fp8Pair):
    case = SimpleNamespace(backend="torchao")
    def __init__(self):
        arm = "an arm"
        self._arms = SimpleNamespace(fp8=arm, bf16=arm, run=lambda begin: "of an earlier test")
        self.notes = Notes().of("a case", "a model")
    def _before(self, question): self.used = True
    def assert_loss(self): self._note("loss", passed("fine").answer("loss", {}))

@pytest.fixture
def fp8_pair(): return Pair()
"""


def run(pytester, code, *arguments):
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(f"import pytest\n{code}")
    # Whatever filters of warnings other tests have left in this process.
    return pytester.runpytest("-p", "no:benchmark", "-W", "always", *arguments)


SILENT = [
    ("def test_mine(fp8_pair): assert fp8_pair", "test_mine takes fp8_pair and asks nothing of it"),
    ("def test_mine(fp8_pair): print(fp8_pair.case)", "test_mine takes fp8_pair and asks nothing of it"),
    ("def test_mine(fp8_pair): fp8_pair.assert_loss", "test_mine takes fp8_pair and asks nothing of it"),
    ("@pytest.mark.fp8(recipe='rowwise')\ndef test_mine(): pass", "test_mine has a mark fp8 that is not read"),
]
ASKING = [
    "def test_mine(fp8_pair): fp8_pair.assert_loss()",
    "def test_mine(fp8_pair): assert fp8_pair.fp8",
    "def test_mine(fp8_pair): assert fp8_pair.evidence(fp8_pair.loss_evidence)",
    "@pytest.fixture\ndef asked(fp8_pair): fp8_pair.assert_loss()\ndef test_mine(asked): pass",
    "def test_mine(): pass",
    "pytestmark = pytest.mark.fp8(recipe='rowwise')\ndef test_mine(): pass",
]


@pytest.mark.parametrize(("code", "says"), SILENT)
def test_a_test_that_asks_nothing_is_warned_about(pytester, code, says):
    result = run(pytester, code)
    result.assert_outcomes(passed=1, warnings=1)
    result.stdout.fnmatch_lines([f"*PytestWarning: FP8-R??: {says}*", "*next:*fp8_pair*"])


@pytest.mark.parametrize("option", ["--fp8-strict", "--fp8-gpu=h200"])
@pytest.mark.parametrize(("code", "says"), SILENT[::3])
def test_a_gate_fails_with_it(pytester, option, code, says):
    result = run(pytester, code, option)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines([f"FP8-R??: {says}*", "*next:*"])


@pytest.mark.parametrize("code", ASKING)
def test_whoever_asks_or_has_nothing_to_ask_is_left_alone(pytester, code):
    run(pytester, code, "--fp8-strict").assert_outcomes(passed=1, warnings=0)


def test_a_test_that_failed_anyway_hears_of_its_own_failure_alone(pytester):
    result = run(pytester, "def test_mine(fp8_pair): assert 1 == 2")
    result.assert_outcomes(failed=1, warnings=0)
