"""What a session tells while it waits for arms: a live line on a terminal, plain lines in a log, nothing elsewhere."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import termios
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from helpers.fakes import H200, install
from pytest_fp8.report.progress import LogLines, Progress

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
DRAWN = re.compile(rb"\x1bD\x1b\[A\x1b7\x1b\[B\r\x1b\[2K(.*?)\x1b8")
"""The line below is emptied and written; the cursor comes back."""
CLEARED = b"\x1b7\x1b[B\r\x1b[2K\x1b8"
STYLE = re.compile(rb"\x1b\[[0-9;]*m")


@pytest.fixture
def run(pytester):
    """``run(*args)``: the bytes that pytest writes to a terminal, or with ``terminal=False`` to a pipe."""

    def run(*args, columns=100, terminal=True, ends="pass", build=0.4, lasts=0.15, more="", **env):
        tests = str(Path(__file__).parent)
        pytester.makeconftest(SLOW_ARMS.format(tests=tests, build=build, lasts=lasts))
        pytester.makepyfile(test_suite=SUITE.format(ends=ends) + more)
        theirs, ours = pty.openpty() if terminal else os.pipe()
        if not terminal:
            theirs, ours = ours, theirs
        else:
            termios.tcsetwinsize(ours, (24, columns))
        mine, given = (theirs, ours) if terminal else (ours, theirs)
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *args]
        env = {**os.environ, "TERM": "xterm", **env}
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=given, stderr=given, env=env)
        os.close(given)
        written = b""
        try:
            while part := os.read(mine, 65536):
                written += part
        except OSError:
            """How the end of a pseudo-terminal is told."""
        os.close(mine)
        process.wait(timeout=60)
        return STYLE.sub(b"", written).replace(b"\r\n", b"\n")

    return run


def own_output(written):
    """What pytest wrote itself. The live line must be gone wherever it did."""
    marked = DRAWN.sub(b"\x01", written).replace(CLEARED, b"\x02")
    assert not re.search(rb"\x01[^\x01\x02]", marked), "written while the live line was there"
    return re.sub(rb"[\x01\x02]", b"", marked).decode()


@pytest.mark.oldest
def test_a_live_line_says_case_question_work_and_times_and_is_gone_before_each_result(run):
    written = run("-v")
    [line, *_] = lines = [line.decode() for line in DRAWN.findall(written)]
    assert re.fullmatch(r"fp8: tiny-torchao-rowwise layers: build of tiny-bf16, 0 s; 0:00 in all", line), line
    assert any("build of the FP8 arm" in each for each in lines)
    own = own_output(written)
    for test in ("test_layers[tiny-torchao-rowwise]", "test_memory[tiny-torchao-rowwise]", "test_other[1]"):
        assert re.search(rf"^test_suite\.py::{re.escape(test)} PASSED +\[ *\d+%\]$", own, re.M), own
    assert "printed" not in own


def test_a_test_without_a_case_that_waits_for_an_arm_is_told_by_its_name(run):
    written = run(more=WITHOUT_A_CASE)
    lines = [line.decode() for line in DRAWN.findall(written)]
    assert any(line.startswith("fp8: test_control[dgrad-x2]: curve of micro-bf16-emulated, 0 s; ") for line in lines)


def test_dots_stay_on_their_line_and_a_narrow_terminal_cuts_the_live_one(run):
    written = run(columns=50)
    assert DRAWN.search(written)[1].decode() == "fp8: tiny-torchao-rowwise layers: build of tiny-…"
    own = own_output(written)
    assert re.search(r"^test_suite\.py \.\.\.\. *\[100%\]$", own, re.M), own


def test_without_capture_it_is_there_too(run):
    written = run("-s")
    assert DRAWN.search(written)
    assert re.search(r"^test_suite\.py printed\n\.printed\n\.printed\n\.\.$", own_output(written), re.M)


@pytest.mark.parametrize(
    "ends",
    ["raise KeyboardInterrupt", pytest.param("fp8_pair.fp8.request('blocks_of_nothing')", marks=pytest.mark.nightly)],
)
def test_the_line_is_gone_where_a_test_ends_badly(run, ends):
    own = own_output(run("-v", ends=ends))
    assert "KeyboardInterrupt" in own or "1 failed, 3 passed" in own


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
    assert b"build of" not in run(*args)


@pytest.mark.parametrize("args", [(), pytest.param(("-v",), marks=pytest.mark.oldest)])
def test_a_log_has_whole_lines_between_those_of_pytest(run, args):
    own = run(*args, terminal=False).decode()
    told = [line for line in own.splitlines() if "fp8: tiny-torchao-rowwise" in line]
    assert all(re.fullmatch(r"fp8: \S+ layers: (build|ledger) of .*, \d s; 0:0\d in all", line) for line in told)
    assert 2 <= len(told) <= 5, own
    assert "\x1b" not in own
    if args:
        assert re.search(r"^test_suite\.py::test_layers\[tiny-torchao-rowwise\] PASSED +\[ *\d+%\]$", own, re.M), own
    else:
        assert sum(line.count(".") for line in re.findall(r"^(?:test_suite\.py )?(\.+)(?: |$)", own, re.M)) == 4


def test_a_terminal_that_obeys_nothing_and_one_of_a_ci_job_have_lines(run):
    for env in ({"TERM": "dumb"}, {"CI": "true"}):
        written = run(**env)
        assert b"\x1b" not in written
        assert b"\nfp8: tiny-torchao-rowwise layers: build of tiny-bf16" in written


def test_what_is_shorter_than_a_blink_shows_nothing(run):
    # A host that is busy elsewhere may take a tenth of a second for nothing.
    assert not DRAWN.search(run(build=0.01, lasts=1))


def test_a_log_has_a_line_for_what_lasts_and_one_a_minute_at_least():
    written = []
    reporter = SimpleNamespace(write_line=written.append, flush=lambda: None)
    log = LogLines(reporter, nullcontext)
    parts = ("1b-torchao-rowwise loss", "curve of 1b-bf16, 6 s", "0:06 in all")
    log.tell(parts)
    told = log.due(0.0, told=False) - 10
    assert written == ["fp8: 1b-torchao-rowwise loss: curve of 1b-bf16, 6 s; 0:06 in all"]
    assert log.due(told, told=True) == told + 60, "nothing new"
    assert log.due(told + 20, told=False) == told + 25, "something new that lasts"
    assert log.due(told + 1, told=False) == told + 10, "not more than a handful a minute"
    assert log.due(told + 59, told=False) == told + 60, "many short ones after each other"


class Lines:
    """A display that tells at once and keeps what is told."""

    def __init__(self):
        self.told = []

    def due(self, began, told):
        return 0.0 if not told else began + 1e6

    def tell(self, parts):
        self.told.append(parts[2].split(maxsplit=1)[1])

    def clear(self): ...


def says(progress, display, case, what="blocks"):
    """What the display is told of the time that is left while an arm is waited for."""
    display.told.clear()
    progress.test(case, "speedup")
    with progress.waiting("a", what):
        deadline = time.monotonic() + 10
        while not display.told and time.monotonic() < deadline:
            time.sleep(0.01)
    return display.told[0]


def test_what_is_left_goes_by_how_long_the_cases_took_last_time(monkeypatch):
    now, unfinished, display = [0.0], ["first", "second"], Lines()
    monkeypatch.setattr("pytest_fp8.report.progress.time", SimpleNamespace(monotonic=lambda: now[0]))
    progress = Progress(display, lambda: unfinished)
    progress.last = {"first": 60.0, "second": 60.0}
    assert says(progress, display, "first") == "about 2 min left"
    now[0] += 40
    assert says(progress, display, "first", "layers") == "about 80 s left"
    now[0] += 300
    assert says(progress, display, "first", "memory") == "about 60 s left"
    unfinished.remove("first")
    assert says(progress, display, "second") == "about 60 s left"
    now[0] += 120
    assert says(progress, display, "second", "layers") == "longer than last time"
    unfinished.append("new")
    assert says(progress, display, "second", "memory") == "in all"


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
