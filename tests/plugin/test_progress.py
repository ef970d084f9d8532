"""What a session tells while it waits for arms: a line now and then."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from pytest_fp8.report import progress

pytestmark = pytest.mark.slow

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
        pass
"""


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


@pytest.mark.parametrize("args", [("-q",), ("-p", "no:terminal"), ()])
def test_it_says_nothing_when_quiet_without_a_reporter_and_under_xdist(pytester, args):
    config = pytester.parseconfigure(*args)
    if not args:
        config.pluginmanager.register(object(), "dsession")
    assert progress.follow(config) is None


@pytest.mark.oldest
def test_a_log_has_whole_lines_between_those_of_pytest(pytester):
    pytester.makeconftest(SLOW_ARMS.format(tests=str(Path(__file__).parents[1])))
    pytester.makepyfile(test_suite=SUITE)
    own = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-v", timeout=60).stdout.str()
    told = [line for line in own.splitlines() if "fp8: tiny-torchao-rowwise" in line]
    assert all(re.fullmatch(r"fp8: \S+ layers: (build|ledger) of .*, \d s; 0:0\d in all", line) for line in told)
    assert len(told) >= 2, own
    assert "\x1b" not in own
    assert re.search(r"^test_suite\.py::test_layers\[tiny-torchao-rowwise\] PASSED +\[ *\d+%\]$", own, re.M), own
