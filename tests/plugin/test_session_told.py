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
from pytest_fp8.report.record import WRITTEN

ROOT = Path(__file__).parents[2]
TESTS = """
    import os, signal
    import pytest
    from pytest_fp8 import Case

    def of(*recipes, **more):
        return pytest.mark.fp8(cases=[Case("tiny", "torchao", recipe) for recipe in recipes], **more)
"""
"""What test files begin with."""
ONE = f"""{TESTS}
    @of("rowwise")
    def test_first(fp8_pair):
        decision = fp8_pair.assert_layers()
        {{after}}

    @of("rowwise")
    def test_second(fp8_pair):
        fp8_pair.assert_memory()
"""


FAKES = f"""
    import sys, time
    sys.path.insert(0, {str(ROOT / "tests")!r})
    import pytest
    from helpers.fakes import H200, FakeProcess, install

    install(pytest.MonkeyPatch(), H200)
"""
"""The conftest of a session in a process of its own."""


def run(pytester, *arguments, **how):
    """The session's result, its report and its summary."""
    result = pytester.runpytest("--fp8-report=out", *arguments, **how)
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


@pytest.mark.oldest
@pytest.mark.parametrize(
    ("roles", "after", "failed"),
    [
        (None, "assert decision.numbers['linears'] == -1", ["test_first[tiny-torchao-rowwise]"]),
        (("fprop",), "pass", []),
    ],
    ids=["beside its answers", "with its answer"],
)
def test_a_test_that_fails_is_in_the_summary_unless_its_answer_is(pytester, monkeypatch, roles, after, failed):
    install(monkeypatch, H200, executed_roles=roles)
    pytester.makepyfile(ONE.format(after=after))
    _, report, summary = run(pytester, "--fp8-gpu=h200")
    assert [test.rpartition("::")[2] for test in report.failed_tests] == failed
    assert re.findall(r"(\d+) test\(s\) failed with something else", summary) == ["1"] * len(failed)


INTERRUPTED = f"""{TESTS}
    @of("rowwise", "tensorwise", question="layers")
    def test_layers(fp8_pair):
        fp8_pair.assert_layers()

    @of("rowwise", "tensorwise", question="loss")
    def test_loss(fp8_pair, request):
        if "tensorwise" in request.node.name:
            raise KeyboardInterrupt
        fp8_pair.assert_loss()

    @of("rowwise_with_gw_hp")
    def test_never_reached(fp8_pair):
        fp8_pair.assert_layers()
"""


def test_no_case_passes_of_which_a_session_that_was_ended_left_tests(pytester, monkeypatch):
    install(monkeypatch, H200)
    pytester.makepyfile(INTERRUPTED)
    _, report, summary = run(pytester, "--fp8-gpu=h200", no_reraise_ctrlc=True)
    assert report.finished is False
    assert {name: (entry.open_tests, entry.verdict) for name, entry in report.entries.items()} == {
        "tiny-torchao-rowwise": (0, "PASS"),
        "tiny-torchao-tensorwise": (1, "UNFINISHED"),
    }
    assert summary.startswith("## FP8, not finished: 1 UNFINISHED, 1 PASS\n")
    assert "2 test(s) of 2 case(s) were not run, or not to their end: " in summary
    assert "tiny-torchao-rowwise&#95;with&#95;gw&#95;hp" in summary, "a case without a row"


def test_the_end_of_a_session_after_its_last_fp8_test_is_told_too(pytester, monkeypatch):
    install(monkeypatch, H200)
    pytester.makepyfile(ONE.format(after="pass") + "\n    def test_third():\n        raise KeyboardInterrupt\n")
    _, report, summary = run(pytester, "--fp8-gpu=h200", no_reraise_ctrlc=True)
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


RETRIED = f"""{TESTS}
    @of("rowwise")
    def test_retried(fp8_pair):
        try:
            fp8_pair.assert_layers()
        {{by}}:
            pass
"""


@pytest.mark.parametrize("caught", [True, False])
def test_a_fail_whose_exception_was_caught_is_told(pytester, monkeypatch, caught):
    install(monkeypatch, H200, executed_roles=("fprop",))
    pytester.makepyfile(RETRIED.format(by="except AssertionError" if caught else "finally"))
    result = pytester.runpytest("--fp8-gpu=h200")
    told = "tiny-torchao-rowwise layers is FAIL, and no test failed with it: its exception was caught"
    assert (told in result.stdout.str()) is caught
    assert result.parseoutcomes() == ({"passed": 1} if caught else {"failed": 1})


TWO = f"""{TESTS}
    @of("rowwise")
    def test_done(fp8_pair):
        fp8_pair.assert_layers()
        fp8_pair.assert_memory()

    @of("tensorwise")
    def test_under_way(fp8_pair):
        fp8_pair.assert_layers()
        os.kill(int(os.environ.get("CONTROLLER", os.getpid())), signal.SIGKILL)
"""


@pytest.mark.parametrize("workers", [(), pytest.param(("-n1",), marks=pytest.mark.slow)], ids=["one process", "xdist"])
def test_a_session_that_is_killed_leaves_a_journal_from_which_its_page_is_written(pytester, monkeypatch, workers):
    install(monkeypatch, H200)
    if workers:
        pytest.importorskip("xdist")
        monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    pytester.makeconftest(FAKES)
    pytester.makepyfile(TWO)
    monkeypatch.setenv("CONTROLLER", "")
    stale = [pytester.path / "out" / name for name in WRITTEN]
    stale[0].parent.mkdir()
    for path in stale:
        path.write_text("of the run before")
    command = "import os, sys, pytest; os.environ['CONTROLLER'] = str(os.getpid()); sys.exit(pytest.main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", command, "-p", "no:cacheprovider", "--fp8-report=out", "--fp8-gpu=h200", *workers],
        capture_output=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    assert [path.name for path in stale if path.exists()] == []
    assert main(["report", "out"]) == 0
    report = read_report(pytester.path / "out")
    assert report.finished is False
    assert report.provenance.gpu["name"] == H200.name
    rows = {name: {q: each.verdict for q, each in row.decisions.items()} for name, row in report.entries.items()}
    assert rows["tiny-torchao-rowwise"] == {"layers": "PASS", "memory": "NOT_EXERCISED"}
    assert report.open_tests.keys() == {"tiny-torchao-tensorwise"}


# -- a line now and then, while it waits -----------------------------------------------------------------------------


SLOW_ARMS = """
    from pytest_fp8.report import progress

    receive = FakeProcess.receive
    FakeProcess.receive = lambda self, timeout=0: time.sleep(0.4) or receive(self, timeout)
    progress.APART_SECONDS = 0.15
"""
WAITING = f"""{TESTS}
    def test_other():
        print("printed")

    @of("rowwise", question="layers")
    def test_layers(fp8_pair):
        print("printed")
        fp8_pair.assert_layers()
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
    pytester.makeconftest(FAKES + SLOW_ARMS)
    pytester.makepyfile(test_suite=WAITING)
    own = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-v", timeout=60).stdout.str()
    told = [line for line in own.splitlines() if "fp8: tiny-torchao-rowwise" in line]
    assert all(re.fullmatch(r"fp8: \S+ layers: (build|ledger) of .*, \d s; 0:0\d in all", line) for line in told)
    assert len(told) >= 2, own
    assert "\x1b" not in own
    assert re.search(r"^test_suite\.py::test_layers\[tiny-torchao-rowwise\] PASSED +\[ *\d+%\]$", own, re.M), own


# -- step times in pytest-benchmark's table, and none where that plugin is off ---------------------------------------


FASTER = ("-k", "faster and rowwise")


@pytest.fixture
def timed(pytester, monkeypatch):
    pytest.importorskip("pytest_benchmark")
    install(monkeypatch, H200)
    # The inner run is not distributed, whatever the outer one is.
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    pytester.makepyfile(SUITE)
    return pytester


def test_both_arms_of_a_case_are_a_group(timed):
    result = timed.runpytest("--benchmark-json=out.json", *FASTER)
    result.stdout.fnmatch_lines(["*benchmark 'tiny-torchao-rowwise': 2 tests*", "*tiny-torchao-rowwise?fp8?*"])
    rows = json.loads((timed.path / "out.json").read_text())["benchmarks"]
    assert {row["name"] for row in rows} == {"tiny-torchao-rowwise[bf16]", "tiny-torchao-rowwise[fp8]"}
    rounds = {row["stats"]["rounds"] for row in rows}
    assert len(rounds) == 1, "as many blocks of the one arm as of the other"
    assert rounds.pop() == 12, "two entries for each of the first six ABBA blocks, which settle it"
    assert rows[0]["stats"]["median"] == pytest.approx(0.1, rel=0.01), "seconds"


@pytest.mark.parametrize("arguments", [("--benchmark-disable",), ("-p", "no:benchmark")])
def test_none_where_it_is_off(timed, arguments):
    result = timed.runpytest(*arguments, *FASTER)
    result.assert_outcomes(passed=1, deselected=9)
    result.stdout.no_fnmatch_line("*benchmark 'tiny*")


# -- where a failure is shown, and how the clone runs without the plugin ---------------------------------------------


WRONG = "Workload(build=lambda: None, batch=lambda: None)"


@pytest.mark.oldest
@pytest.mark.parametrize(
    ("source", "place", "says"),
    [
        ("from pytest_fp8.gpu import known\ndef test_mine():\n    known('x100')", "3: SettingsError", "FP8-R01: "),
        (f"from pytest_fp8 import Workload\ndef test_mine():\n    {WRONG}", "3: SettingsError", "FP8-R33: *batch="),
        (f"from pytest_fp8 import Workload\n{WRONG}", "2: *", "FP8-R33: *batch="),
    ],
    ids=["of the package", "of a workload in a test", "of a workload in a module"],
)
def test_an_error_is_short_and_shown_at_the_line_that_asked(pytester, source, place, says):
    pytester.makepyfile(source)
    result = pytester.runpytest("-p", "no:benchmark", "-rN")
    for line in (f"E  *SettingsError: {says}*", f"*.py:{place}", f"*{source.splitlines()[-1].strip()}"):
        result.stdout.fnmatch_lines([line])
    for line in ("*During handling*", "*workload.py*", "*errors.py*"):
        result.stdout.no_fnmatch_line(line)
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
