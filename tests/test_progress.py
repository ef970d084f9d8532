"""What a session tells while it waits for arms: a line now and then."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

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
    progress.FIRST_SECONDS = progress.APART_SECONDS = {lasts}
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
        from pytest_fp8.plugin import session_of

        with session_of(request.config).pairs.pool().stopwatch.clock("micro-bf16-emulated", "curve"):
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
    assert len(told) >= 2, own
    assert "\x1b" not in own
    if args:
        assert re.search(r"^test_suite\.py::test_layers\[tiny-torchao-rowwise\] PASSED +\[ *\d+%\]$", own, re.M), own
    else:
        assert sum(line.count(".") for line in re.findall(r"^(?:test_suite\.py )?(\.+)(?: |$)", own, re.M)) == 4


def test_what_is_short_has_no_line(run):
    assert "fp8: tiny" not in run(build=0.01, lasts=3)
