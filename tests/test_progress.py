"""What a session tells while it waits for arms: a line now and then."""

from __future__ import annotations

import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from helpers.fakes import H200, install
from pytest_fp8.report.progress import Progress

pytestmark = pytest.mark.slow

SLOW_ARMS = """
    import sys, time
    sys.path.insert(0, {tests!r})
    import pytest
    from helpers.fakes import H200, FakeProcess, install
    from pytest_fp8.report import progress

    install(pytest.MonkeyPatch(), H200)
    receive = FakeProcess.receive
    FakeProcess.receive = lambda self, timeout=0: time.sleep({build}) or receive(self, timeout)
    progress.LASTS_SECONDS = progress.APART_SECONDS = {lasts}
"""
SUITE = """
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
        {ends}
"""
WITHOUT_A_CASE = """
    @pytest.mark.parametrize("control", ["dgrad-x2"])
    def test_control(control, request):
        import time
        from pytest_fp8.session import SESSION

        with request.config.stash[SESSION].pairs.pool().stopwatch.clock("micro-bf16-emulated", "curve"):
            time.sleep(0.4)
"""


@pytest.fixture
def run(pytester):
    """``run(*args)``: what pytest writes."""

    def run(*args, build=0.4, lasts=0.15, more=""):
        tests = str(Path(__file__).parent)
        pytester.makeconftest(SLOW_ARMS.format(tests=tests, build=build, lasts=lasts))
        pytester.makepyfile(test_suite=SUITE.format(ends="pass") + more)
        return pytester.runpytest_subprocess("-p", "no:cacheprovider", *args, timeout=60).stdout.str()

    return run


def test_a_test_without_a_case_that_waits_for_an_arm_is_told_by_its_name(run):
    assert "fp8: test_control[dgrad-x2]: curve of micro-bf16-emulated, 0 s; " in run(more=WITHOUT_A_CASE)


@pytest.mark.parametrize(
    "args",
    [
        ("-q",),
        pytest.param(("-p", "no:terminal"), marks=pytest.mark.nightly),
        pytest.param(("-n1",), marks=pytest.mark.oldest),
    ],
)
def test_it_says_nothing_when_quiet_without_a_reporter_and_under_xdist(run, args):
    if args == ("-n1",):
        pytest.importorskip("xdist")
    assert "build of" not in run(*args)


@pytest.mark.parametrize("args", [(), pytest.param(("-v",), marks=pytest.mark.oldest)])
def test_a_log_has_whole_lines_between_those_of_pytest(run, args):
    own = run(*args)
    told = [line for line in own.splitlines() if "fp8: tiny-torchao-rowwise" in line]
    assert all(re.fullmatch(r"fp8: \S+ layers: (build|ledger) of .*, \d s; 0:0\d in all", line) for line in told)
    assert 2 <= len(told) <= 5, own
    assert "\x1b" not in own
    if args:
        assert re.search(r"^test_suite\.py::test_layers\[tiny-torchao-rowwise\] PASSED +\[ *\d+%\]$", own, re.M), own
    else:
        assert sum(line.count(".") for line in re.findall(r"^(?:test_suite\.py )?(\.+)(?: |$)", own, re.M)) == 4


def test_what_is_short_has_no_line(run):
    assert "fp8: tiny" not in run(build=0.01, lasts=3)


def test_there_is_a_line_for_what_lasts_and_one_a_minute_at_least(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("pytest_fp8.report.progress.time", SimpleNamespace(monotonic=lambda: now[0]))
    progress = Progress(lambda line: None, lambda: ())
    assert progress.due() == 105, "something that lasts"
    progress._last_line = 99.0
    assert progress.due() == 109, "not more than a handful a minute"
    progress._stage_began = 157.0
    assert progress.due() == 159, "many short ones after each other"
    progress._told = True
    assert progress.due() == 159, "nothing new"


class Lines(Progress):
    """Tells at once, and keeps what is told."""

    def __init__(self, open_cases):
        self.told = []
        super().__init__(self.told.append, open_cases)

    def due(self):
        return 0.0 if not self._told else 1e9


def says(progress, case, what="blocks"):
    """What is told of the time that is left while an arm is waited for."""
    progress.told.clear()
    progress.test(case, "speedup")
    with progress.waiting("a", what):
        deadline = time.monotonic() + 10
        while not progress.told and time.monotonic() < deadline:
            time.sleep(0.01)
    return progress.told[0].rpartition("; ")[2].split(maxsplit=1)[1]


def test_what_is_left_goes_by_how_long_the_cases_took_last_time(monkeypatch):
    now, unfinished = [0.0], ["first", "second"]
    monkeypatch.setattr("pytest_fp8.report.progress.time", SimpleNamespace(monotonic=lambda: now[0]))
    progress = Lines(lambda: unfinished)
    progress.last = {"first": 60.0, "second": 60.0}
    assert says(progress, "first") == "about 2 min left"
    now[0] += 40
    assert says(progress, "first", "layers") == "about 80 s left"
    now[0] += 300
    assert says(progress, "first", "memory") == "about 60 s left"
    unfinished.remove("first")
    assert says(progress, "second") == "about 60 s left"
    now[0] += 120
    assert says(progress, "second", "layers") == "longer than last time"
    unfinished.append("new")
    assert says(progress, "second", "memory") == "in all"


def test_the_seconds_of_whole_cases_are_kept_for_the_next_session(pytester, monkeypatch):
    install(monkeypatch, H200)
    pytester.makepyfile(SUITE.format(ends="pass"))
    first = pytester.runpytest("--fp8-gpu=h200")
    first.stdout.no_fnmatch_line("*last time*")
    pytester.runpytest("--fp8-gpu=h200").stdout.fnmatch_lines("fp8: 1 case(s) took * s last time")
    pytester.runpytest("--fp8-gpu=h200", "-p", "no:cacheprovider").stdout.no_fnmatch_line("*last time*")
    pytester.makepyfile(test_more=SUITE.format(ends="pass").replace('"rowwise"', '"tensorwise"'))
    more = pytester.runpytest("--fp8-gpu=h200", "-x", "-k", "not memory")
    more.stdout.fnmatch_lines("fp8: 1 case(s) took * s last time; 1 case(s) did not run here before")


def test_a_case_that_was_cut_short_is_not_kept(pytester, monkeypatch):
    install(monkeypatch, H200)
    pytester.makepyfile(
        SUITE.format(ends="pass").replace(
            '        print("printed")\n        fp8_pair', "        raise KeyboardInterrupt\n        fp8_pair"
        )
    )
    pytester.inline_run("--fp8-gpu=h200", no_reraise_ctrlc=True)
    pytester.runpytest("--fp8-gpu=h200", "--co").stdout.no_fnmatch_line("*last time*")
    [*kept] = pytester.path.glob(".pytest_cache/v/fp8/*")
    assert not kept
