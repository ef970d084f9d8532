"""A gate in which nothing was asked of the declared GPU is not green, whatever kept its tests from it."""

from __future__ import annotations

import textwrap
from types import SimpleNamespace

import pytest

from helpers.fakes import H200, SUITE, install
from pytest_fp8.report.ledger import Ledger


def test_a_declared_gpu_and_tests_that_ask_it_nothing_fail_the_session(pytester, monkeypatch):
    install(monkeypatch, H200)
    pytester.makepyfile("def test_nothing(): pass")
    result = pytester.runpytest("--fp8-gpu=h200")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*no test of this run asks anything of a GPU*"])


SKIPPERS = {
    "a mark": "import pytest\npytestmark = pytest.mark.skip(reason='not today')\n",
    "a fixture": "import pytest\n@pytest.fixture(autouse=True)\ndef f():\n    pytest.skip('not today')\n",
    "no run": "import pytest\npytestmark = pytest.mark.xfail(reason='not today', run=False)\n",
}


@pytest.mark.parametrize("skipper", SKIPPERS)
def test_a_gate_whose_tests_somebody_else_skipped_is_not_green(pytester, monkeypatch, skipper):
    install(monkeypatch, H200)
    pytester.makepyfile(SKIPPERS[skipper] + textwrap.dedent(SUITE))
    result = pytester.runpytest("--fp8-gpu=h200")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*no FP8 test ran on it: *not today. A gate that ran nothing is not green*"])


TIMES_AND_SKIPS = """
    import pytest

    @pytest.mark.fp8(model="tiny", backend="torchao", recipe="rowwise", floor=0.5)
    def test_it(fp8_pair):
        fp8_pair.timing_evidence()
        pytest.skip("not today")
"""


def test_a_test_that_timed_its_arms_and_then_skipped_answered_nothing(pytester, monkeypatch):
    install(monkeypatch, H200)
    pytester.makepyfile(TIMES_AND_SKIPS)
    result = pytester.runpytest("--fp8-gpu=h200")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*no FP8 test ran on it: not today. A gate that ran nothing is not green*"])


def test_a_run_that_was_interrupted_at_once_is_not_said_to_have_run_nothing(pytester, monkeypatch, capsys):
    install(monkeypatch, H200)
    pytester.makeconftest("def pytest_runtest_call(item):\n    raise KeyboardInterrupt\n")
    pytester.makepyfile(SUITE)
    done = pytester.inline_run("--fp8-gpu=h200", no_reraise_ctrlc=True)
    assert done.ret == pytest.ExitCode.INTERRUPTED
    said = capsys.readouterr().out
    assert "KeyboardInterrupt" in said
    assert "ran nothing" not in said


SET_UP_FAILS = """
    @pytest.fixture
    def broken():
        raise RuntimeError("no network")

    @pytest.mark.xfail
    @pytest.mark.fp8(model="tiny", backend="torchao", recipe="rowwise")
    def test_it(broken, fp8_pair):
        fp8_pair.assert_layers()
"""

NEVER_ASKS = """
    @pytest.mark.fp8(model="tiny", backend="torchao", recipe="rowwise")
    def test_it(fp8_pair):
        pytest.xfail("not today")
"""


@pytest.mark.parametrize(("test", "says"), [(SET_UP_FAILS, "expected to fail"), (NEVER_ASKS, "not today")])
def test_a_test_that_is_expected_to_fail_ran_where_it_asked_something(pytester, monkeypatch, test, says):
    install(monkeypatch, H200)
    pytester.makepyfile("import pytest\n" + textwrap.dedent(test))
    result = pytester.runpytest("--fp8-gpu=h200")
    assert result.ret == 1
    result.assert_outcomes(xfailed=1)
    result.stdout.fnmatch_lines([f"*no FP8 test ran on it: {says}. A gate that ran nothing is not green*"])


def test_pytest_exit_before_the_first_test_is_no_green_gate(pytester, monkeypatch):
    install(monkeypatch, H200)
    pytester.makeconftest("import pytest\ndef pytest_runtest_setup(item):\n    pytest.exit('no', returncode=0)\n")
    pytester.makepyfile(SUITE)
    result = pytester.runpytest_subprocess("--fp8-gpu=h200", "-p", "no:cacheprovider")
    assert result.ret == 1


def test_what_could_not_be_asked_for_want_of_a_library_did_not_run():
    ledger = Ledger()
    ledger.skipped("test_a", "torchao is not installed")
    ledger.ended("a case", "test_a", SimpleNamespace(skipped=False, failed=True, when="setup"))
    assert ledger.ran_on_gpu == 0
    ledger.ended("a case", "test_b", SimpleNamespace(skipped=True, failed=False, when="call", longrepr="out of memory"))
    assert ledger.not_run == {"torchao is not installed": ["test_a"], "out of memory": ["test_b"]}
