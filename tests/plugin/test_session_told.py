"""What a session tells: in its report, beside its verdicts; while it waits for arms; in pytest-benchmark's table; and
at which line a failure is shown."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers.fakes import H200, SUITE, install
from pytest_fp8.cli import main
from pytest_fp8.report import progress
from pytest_fp8.report.files import read_report

ONE = """
    import pytest
    from pytest_fp8 import Case

    CASE = pytest.mark.fp8(cases=[Case("tiny", "torchao", "rowwise")])

    @CASE
    def test_first(fp8_pair):
        decision = fp8_pair.assert_layers()
        {after}

    @CASE
    def test_second(fp8_pair):
        fp8_pair.assert_memory()
"""


def run(pytester, *arguments):
    """The session's result, its report and its summary."""
    result = pytester.runpytest("--fp8-report=out", *arguments)
    return result, read_report(pytester.path / "out"), (pytester.path / "out/summary.md").read_text()


def test_a_gate_without_its_gpu_leaves_a_report_that_says_so(pytester, monkeypatch, tmp_path):
    monkeypatch.setattr("pytest_fp8.gpu.detect", lambda: (None, "no NVIDIA GPU (driver not loaded)"))
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "page.md"))
    pytester.makepyfile(SUITE)
    result, report, summary = run(pytester, "--fp8-gpu=h200")
    assert result.ret == 1
    assert (tmp_path / "page.md").read_text() == summary
    assert summary.startswith("## FP8: nothing ran\n")
    assert "A gate that ran nothing is not green" in summary
    assert "driver not loaded" in summary
    assert (report.entries, report.ran_on_gpu, report.finished) == ({}, 0, True)
    assert report.provenance.gpu == {"name": "none"}
    assert "driver not loaded" in (pytester.path / "out/index.html").read_text()


def test_a_test_that_fails_beside_its_answers_is_in_the_summary(pytester, monkeypatch):
    install(monkeypatch, H200)
    pytester.makepyfile(ONE.format(after="assert decision.numbers['linears'] == -1"))
    _, report, summary = run(pytester, "--fp8-gpu=h200")
    assert [test.rpartition("::")[2] for test in report.failed_tests] == ["test_first[tiny-torchao-rowwise]"]
    assert "1 test(s) failed with something else than an answer" in summary


@pytest.mark.oldest
def test_a_test_that_fails_with_its_answer_is_told_once(pytester, monkeypatch):
    install(monkeypatch, H200, executed_roles=("fprop",))
    pytester.makepyfile(ONE.format(after="pass"))
    _, report, summary = run(pytester, "--fp8-gpu=h200")
    assert report.failed_tests == []
    assert "something else" not in summary


def test_no_case_passes_of_which_a_session_that_was_ended_left_tests(pytester, monkeypatch):
    install(monkeypatch, H200)
    pytester.makepyfile(
        """
        import pytest
        from pytest_fp8 import Case

        CASES = [Case("tiny", "torchao", recipe) for recipe in ("rowwise", "tensorwise")]

        @pytest.mark.fp8(cases=CASES, question="layers")
        def test_layers(fp8_pair):
            fp8_pair.assert_layers()

        @pytest.mark.fp8(cases=CASES, question="loss")
        def test_loss(fp8_pair, request):
            if "tensorwise" in request.node.name:
                raise KeyboardInterrupt
            fp8_pair.assert_loss()

        @pytest.mark.fp8(cases=[Case("tiny", "torchao", "rowwise_with_gw_hp")])
        def test_never_reached(fp8_pair):
            fp8_pair.assert_layers()
        """
    )
    pytester.inline_run("--fp8-report=out", "--fp8-gpu=h200", no_reraise_ctrlc=True)
    report, summary = read_report(pytester.path / "out"), (pytester.path / "out/summary.md").read_text()
    assert report.finished is False
    assert {name: entry.open_tests for name, entry in report.entries.items()} == {
        "tiny-torchao-rowwise": 0,
        "tiny-torchao-tensorwise": 1,
    }
    assert {name: entry.verdict for name, entry in report.entries.items()} == {
        "tiny-torchao-rowwise": "PASS",
        "tiny-torchao-tensorwise": "UNFINISHED",
    }
    assert summary.startswith("## FP8, not finished: 1 UNFINISHED, 1 PASS\n")
    assert "2 test(s) of 2 case(s) were not run, or not to their end: " in summary
    assert "tiny-torchao-rowwise&#95;with&#95;gw&#95;hp" in summary, "a case without a row"


def test_the_end_of_a_session_after_its_last_fp8_test_is_told_too(pytester, monkeypatch):
    install(monkeypatch, H200)
    pytester.makepyfile(ONE.format(after="pass") + "\n    def test_third():\n        raise KeyboardInterrupt\n")
    pytester.inline_run("--fp8-report=out", "--fp8-gpu=h200", no_reraise_ctrlc=True)
    report, summary = read_report(pytester.path / "out"), (pytester.path / "out/summary.md").read_text()
    assert (report.finished, report.open_tests) == (False, {})
    assert summary.startswith("## FP8, not finished: 1 NOT EXERCISED\n")
    assert "not finished: all FP8 tests ran" in summary


def test_a_session_that_asks_nothing_leaves_an_earlier_report_as_it_is(pytester, monkeypatch):
    install(monkeypatch, H200)
    pytester.makepyfile(SUITE)
    before = run(pytester, "--fp8-gpu=h200")[1]
    files = sorted(pytester.path.glob("out/**/*"))
    pytester.makepyfile(test_nothing_of_fp8="def test_plain(): pass")
    for arguments in (["test_nothing_of_fp8.py"], ["test_typo.py"]):
        result, after, _ = run(pytester, "--fp8-gpu=h200", *arguments)
        assert result.ret != 0
        assert after.lines == before.lines
        assert sorted(pytester.path.glob("out/**/*")) == files


@pytest.mark.parametrize("caught", [True, False])
def test_a_fail_whose_exception_was_caught_is_told(pytester, monkeypatch, caught):
    install(monkeypatch, H200, executed_roles=("fprop",))
    by = "except AssertionError" if caught else "finally"
    pytester.makepyfile(
        f"""
        import pytest
        from pytest_fp8 import Case

        @pytest.mark.fp8(cases=[Case("tiny", "torchao", "rowwise")])
        def test_retried(fp8_pair):
            try:
                fp8_pair.assert_layers()
            {by}:
                pass
        """
    )
    result = pytester.runpytest("--fp8-gpu=h200")
    told = "tiny-torchao-rowwise layers is FAIL, and no test failed with it: its exception was caught"
    assert (told in result.stdout.str()) is caught
    assert result.parseoutcomes() == ({"passed": 1} if caught else {"failed": 1})


TWO = """
    import os, pathlib, signal
    import pytest
    from pytest_fp8 import Case

    @pytest.mark.fp8(cases=[Case("tiny", "torchao", "rowwise")])
    def test_done(fp8_pair):
        fp8_pair.assert_layers()
        fp8_pair.assert_memory()

    @pytest.mark.fp8(cases=[Case("tiny", "torchao", "tensorwise")])
    def test_under_way(fp8_pair):
        fp8_pair.assert_layers()
        {then}
"""


@pytest.mark.parametrize("workers", [(), pytest.param(("-n1",), marks=pytest.mark.slow)], ids=["one process", "xdist"])
def test_a_session_that_is_killed_leaves_a_journal_from_which_its_page_is_written(pytester, monkeypatch, workers):
    install(monkeypatch, H200)
    if workers:
        pytest.importorskip("xdist")
        monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    tests = str(Path(__file__).parents[1])
    pytester.makeconftest(
        f"""
        import sys
        sys.path.insert(0, {tests!r})
        import pytest
        from helpers.fakes import H200, install
        install(pytest.MonkeyPatch(), H200)
        """
    )
    pytester.makepyfile(TWO.format(then="os.kill(int(os.environ.get('CONTROLLER', os.getpid())), signal.SIGKILL)"))
    monkeypatch.setenv("CONTROLLER", "")
    command = "import os, sys, pytest; os.environ['CONTROLLER'] = str(os.getpid()); sys.exit(pytest.main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", command, "-p", "no:cacheprovider", "--fp8-report=out", "--fp8-gpu=h200", *workers],
        capture_output=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    assert not (pytester.path / "out/report.json").exists()
    assert main(["report", "out"]) == 0
    report = read_report(pytester.path / "out")
    assert report.finished is False
    assert report.provenance.gpu["name"] == H200.name
    rows = {name: {q: each.verdict for q, each in row.decisions.items()} for name, row in report.entries.items()}
    assert rows["tiny-torchao-rowwise"] == {"layers": "PASS", "memory": "NOT_EXERCISED"}
    assert report.open_tests.keys() == {"tiny-torchao-tensorwise"}


# -- a line now and then, while it waits -----------------------------------------------------------------------------


SLOW_ARMS = """
    import sys, time
    sys.path.insert(0, {tests!r})
    import pytest
    from helpers.fakes import H200, FakeProcess, install
    from pytest_fp8.report import progress

    install(pytest.MonkeyPatch(), H200)
    receive = FakeProcess.receive
    FakeProcess.receive = lambda self, timeout=0: time.sleep(0.4) or receive(self, timeout)
    progress.APART_SECONDS = 0.15
"""
WAITING = """
    import pytest
    from pytest_fp8 import Case

    @pytest.mark.parametrize("number", [1, 2])
    def test_other(number):
        print("printed")

    @pytest.mark.fp8(cases=[Case("tiny", "torchao", "rowwise")], question="layers")
    def test_layers(fp8_pair):
        print("printed")
        fp8_pair.assert_layers()

    @pytest.mark.fp8(cases=[Case("tiny", "torchao", "rowwise")], question="memory")
    def test_memory(fp8_pair):
        pass
"""


@pytest.mark.slow
@pytest.mark.parametrize(("apart", "told"), [(0.15, True), (9, False)])
def test_a_long_wait_has_a_line_and_a_short_one_none(monkeypatch, apart, told):
    monkeypatch.setattr(progress, "APART_SECONDS", apart)
    lines = []
    follows = progress.Progress(lines.append)
    follows.test("test_control[dgrad-x2]", None)
    with follows.waiting("micro-bf16-emulated", "save_checkpoint"):
        time.sleep(0.3)
    said = [line.partition(",")[0] for line in lines[:1]]
    assert said == ["fp8: test_control[dgrad-x2]: save checkpoint of micro-bf16-emulated"] * told


@pytest.mark.slow
@pytest.mark.parametrize("args", [("-q",), ("-p", "no:terminal"), ()])
def test_it_says_nothing_when_quiet_without_a_reporter_and_under_xdist(pytester, args):
    config = pytester.parseconfigure(*args)
    if not args:
        config.pluginmanager.register(object(), "dsession")
    assert progress.follow(config) is None


@pytest.mark.slow
@pytest.mark.oldest
def test_a_log_has_whole_lines_between_those_of_pytest(pytester):
    pytester.makeconftest(SLOW_ARMS.format(tests=str(Path(__file__).parents[1])))
    pytester.makepyfile(test_suite=WAITING)
    own = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-v", timeout=60).stdout.str()
    told = [line for line in own.splitlines() if "fp8: tiny-torchao-rowwise" in line]
    assert all(re.fullmatch(r"fp8: \S+ layers: (build|ledger) of .*, \d s; 0:0\d in all", line) for line in told)
    assert len(told) >= 2, own
    assert "\x1b" not in own
    assert re.search(r"^test_suite\.py::test_layers\[tiny-torchao-rowwise\] PASSED +\[ *\d+%\]$", own, re.M), own


# -- step times in pytest-benchmark's table, and none where that plugin is off ---------------------------------------


TIMED = """
    import pytest
    from pytest_fp8 import Case

    @pytest.mark.fp8(cases=[Case("tiny", "torchao", "rowwise")])
    def test_faster(fp8_pair):
        fp8_pair.assert_faster()
"""


@pytest.fixture
def timed(pytester, monkeypatch):
    pytest.importorskip("pytest_benchmark")
    install(monkeypatch, H200)
    # The inner run is not distributed, whatever the outer one is.
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    pytester.makepyfile(TIMED)
    return pytester


def test_both_arms_of_a_case_are_a_group(timed):
    result = timed.runpytest("--benchmark-json=out.json")
    result.stdout.fnmatch_lines(["*benchmark 'tiny-torchao-rowwise': 2 tests*", "*tiny-torchao-rowwise?fp8?*"])
    rows = json.loads((timed.path / "out.json").read_text())["benchmarks"]
    assert {row["name"] for row in rows} == {"tiny-torchao-rowwise[bf16]", "tiny-torchao-rowwise[fp8]"}
    rounds = {row["stats"]["rounds"] for row in rows}
    assert len(rounds) == 1, "as many blocks of the one arm as of the other"
    assert rounds.pop() == 12, "two entries for each of the first six ABBA blocks, which settle it"
    assert rows[0]["stats"]["median"] == pytest.approx(0.1, rel=0.01), "seconds"


@pytest.mark.parametrize("arguments", [("--benchmark-disable",), ("-p", "no:benchmark")])
def test_none_where_it_is_off(timed, arguments):
    result = timed.runpytest(*arguments)
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("*benchmark 'tiny*")


# -- where a failure is shown, and how the clone runs without the plugin ---------------------------------------------


ROOT = Path(__file__).parents[2]


@pytest.mark.oldest
def test_an_error_is_shown_at_the_line_that_asked(pytester):
    pytester.makepyfile("from pytest_fp8.gpu import known\ndef test_mine():\n    known('x100')")
    result = pytester.runpytest("-p", "no:benchmark")
    result.stdout.fnmatch_lines(
        [
            ">       known('x100')",
            "E  *SettingsError: FP8-R01: *",
            "*.py:3: SettingsError",
        ]
    )
    result.stdout.no_fnmatch_line("*errors.py*")


WRONG = "from pytest_fp8 import Workload\n{}Workload(build=lambda: None, batch=lambda: None)\n"


@pytest.mark.parametrize(("where", "line"), [("def test_mine():\n    ", 3), ("", 2)], ids=["in a test", "in a module"])
def test_a_workload_with_a_wrong_signature_is_one_short_error(pytester, where, line):
    pytester.makepyfile(WRONG.format(where))
    result = pytester.runpytest("-p", "no:benchmark", "-rN")
    result.stdout.fnmatch_lines([f"*.py:{line}:*" if not where else f"*.py:{line}: SettingsError"])
    result.stdout.fnmatch_lines(
        ["E  *SettingsError: FP8-R33: the workload's batch= is no function that can be called as it will be"]
    )
    result.stdout.no_fnmatch_line("*During handling*")
    result.stdout.no_fnmatch_line("*workload.py*")
    assert len(result.outlines) < 32


def test_a_test_that_is_skipped_names_its_own_line_and_what_runs_here(pytester):
    pytester.makepyfile("import pytest\n\n@pytest.mark.fp8(recipe='rowwise')\ndef test_mine(fp8_pair): pass")
    result = pytester.runpytest("-rs", "-p", "no:benchmark")
    if "no NVIDIA GPU" not in result.stdout.str():
        pytest.skip("needs a machine without a GPU")
    result.stdout.fnmatch_lines(["SKIPPED * test_a_test_*.py:3: *emulated=True in its mark runs it on the CPU"])


def test_the_clone_runs_without_the_plugin():
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:fp8",
        "-p",
        "no:cacheprovider",
        "tests/unit/test_answers.py",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
