"""A gate in which nothing was asked of the declared GPU is not green, whatever kept its tests from it."""

from __future__ import annotations

import textwrap

import pytest

from helpers.fakes import H200, SUITE, install
from pytest_fp8 import markers


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


EMULATED = """
    import pytest
    from pytest_fp8 import Case

    @pytest.mark.fp8(cases=[Case("tiny", "accelerate_torchao", "tensorwise", emulated=True)])
    def test_it(fp8_pair):
        fp8_pair.assert_layers()

    def test_other():
        pass
"""


@pytest.mark.parametrize("strict", [True, False])
def test_a_gate_without_a_gpu_whose_library_is_missing_says_so_and_is_red_under_strict(pytester, monkeypatch, strict):
    install(monkeypatch, None)
    monkeypatch.setattr(markers, "_library", lambda case: "accelerate is not installed: pip install accelerate")
    pytester.makepyfile(EMULATED)
    result = pytester.runpytest(*(["--fp8-strict"] if strict else []), "--fp8-report=out")
    result.assert_outcomes(passed=1, skipped=1)
    assert result.ret == strict
    result.stdout.fnmatch_lines(["*= FP8 =*", "1 not run: accelerate is not installed: pip install accelerate (*"])
    told = (
        "FP8-R44: no FP8 test ran under --fp8-strict: accelerate is not installed: pip install accelerate. A gate that*"
    )
    (result.stdout.fnmatch_lines if strict else result.stdout.no_fnmatch_line)(told)
    report = (pytester.path / "out/summary.md").read_text()
    assert report.startswith("## FP8: nothing ran")


def test_strict_asks_nothing_of_a_session_without_fp8_tests_or_with_one_that_ran(pytester, monkeypatch):
    install(monkeypatch, None)
    monkeypatch.setattr(markers, "_library", lambda case: "" if case.backend == "torchao" else "not installed")
    pytester.makepyfile(
        test_other="def test_other(): pass",
        test_mixed=textwrap.dedent(EMULATED)
        + """
@pytest.mark.fp8(cases=[Case("tiny", "torchao", "tensorwise", emulated=True)])
def test_mine(fp8_case):
    assert fp8_case
""",
    )
    assert pytester.runpytest("--fp8-strict", "test_other.py").ret == 0
    assert pytester.runpytest("--fp8-strict", "test_mixed.py").ret == 0


@pytest.mark.slow
def test_a_strict_gate_that_ran_nothing_is_red_under_xdist_too(pytester):
    pytester.makepyfile(
        textwrap.dedent(EMULATED).replace("@pytest", "@pytest.mark.skip(reason='not today')\n@pytest", 1)
    )
    result = pytester.runpytest_subprocess("--fp8-strict", "-n", "2", "-p", "no:cacheprovider")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["FP8-R44: no FP8 test ran under --fp8-strict: not today. A gate that ran nothing*"])


TIMES_AND_SKIPS = """
    import pytest
    from pytest_fp8 import Case

    @pytest.mark.fp8(cases=[Case("tiny", "torchao", "rowwise", floor=0.5)])
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


@pytest.mark.oldest
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
    from pytest_fp8 import Case

    @pytest.fixture
    def broken():
        raise RuntimeError("no network")

    @pytest.mark.xfail
    @pytest.mark.fp8(cases=[Case("tiny", "torchao", "rowwise")])
    def test_it(broken, fp8_pair):
        fp8_pair.assert_layers()
"""

NEVER_ASKS = """
    from pytest_fp8 import Case

    @pytest.mark.fp8(cases=[Case("tiny", "torchao", "rowwise")])
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
