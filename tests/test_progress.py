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

from pytest_fp8.report.progress import LogLines, Progress
from pytest_fp8.session_plan import Build, SessionPlan

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

    @pytest.mark.parametrize("number", [1, 2])
    def test_other(number):
        print("printed")

    @pytest.mark.fp8(model="tiny", backend="torchao", recipe="rowwise", question="layers")
    def test_layers(fp8_pair):
        print("printed")
        fp8_pair.assert_layers()

    @pytest.mark.fp8(model="tiny", backend="torchao", recipe="rowwise", question="memory")
    def test_memory(fp8_pair):
        {ends}
"""
WITHOUT_A_CASE = """
    @pytest.mark.parametrize("control", ["dgrad-x2"])
    def test_control(control, request):
        import time
        from pytest_fp8.session import SESSION

        with request.config.stash[SESSION].pool().stopwatch.clock("micro-bf16-emulated", "curve"):
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
    assert re.fullmatch(r"fp8: tiny-torchao-rowwise layers: build of tiny-bf16, 0 s; 0:00, about \d+ s left", line), (
        line
    )
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
    assert all(
        re.fullmatch(r"fp8: \S+ layers: (build|ledger) of .*, \d s; 0:0\d, about \d+ s left", line) for line in told
    )
    assert 2 <= len(told) <= 5, own
    assert "\x1b" not in own
    if args:
        assert re.search(r"^test_suite\.py::test_layers\[tiny-torchao-rowwise\] PASSED +\[ *\d+%\]$", own, re.M), own
    else:
        assert sum(line.count(".") for line in re.findall(r"^(?:test_suite\.py )?(\.+)(?: |$)", own, re.M)) == 4


def test_a_terminal_that_obeys_nothing_and_one_of_a_ci_job_have_lines(run):
    for env in ({"TERM": "dumb"}, {"CI": "true"}):
        written = run("--fp8-undecided=warn", **env)
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


@pytest.mark.parametrize(
    ("seconds", "unfinished", "says"),
    [
        (60, ["first", "second"], "about 2 min left"),
        (1e-9, ["first", "second"], "longer than planned; about 60 s for what follows"),
        (1e-9, ["first"], "longer than planned"),
        (0, ["first", "second"], "about 60 s left"),
    ],
)
def test_a_case_that_lasts_longer_than_planned_is_said_to_do_so(seconds, unfinished, says):
    display = Lines()
    progress = Progress(display, lambda: unfinished)
    first = [Build(("a",), seconds / 2, seconds / 2, "first")] if seconds else []
    progress.plan = SessionPlan([*first, Build(("b",), 30, 30, "second")], 2)
    progress.test("first", "speedup")
    time.sleep(0.01)
    with progress.waiting("a", "blocks"):
        deadline = time.monotonic() + 10
        while not display.told and time.monotonic() < deadline:
            time.sleep(0.01)
    [told] = display.told
    assert told == says


def test_a_model_of_ones_own_is_given_the_time_of_its_steps_once_it_has_trained():
    display = Lines()
    progress = Progress(display, lambda: ["mine"])
    progress.plan = SessionPlan([Build(("bf16", "mine"), 15, 15, "mine")], 1, steps={"mine": 180})

    def says(what):
        display.told.clear()
        progress.test("mine", "loss")
        with progress.waiting("mine", what):
            deadline = time.monotonic() + 10
            while not display.told and time.monotonic() < deadline:
                time.sleep(0.01)
        return display.told[0]

    assert says("build") == "about 30 s left"
    progress.builds = {"mine": [{"imports": 5.0, "second step": 9.0}, {"imports": 5.0, "second step": 0.5}]}
    assert says("curve") == "about 2 min left"


def test_what_is_left_goes_by_how_long_the_cases_before_took(monkeypatch):
    now, unfinished, display = [0.0], ["first", "second"], Lines()
    monkeypatch.setattr("pytest_fp8.report.progress.time", SimpleNamespace(monotonic=lambda: now[0]))
    progress = Progress(display, lambda: unfinished)
    progress.plan = SessionPlan([Build(("a",), 30, 30, "first"), Build(("b",), 30, 30, "second")], 2)

    def says(case, what, seconds):
        now[0] += seconds
        progress.test(case, "speedup")
        display.told.clear()
        with progress.waiting("a", what):
            deadline = time.monotonic() + 10
            while not display.told and time.monotonic() < deadline:
                time.sleep(0.01)
        return display.told[0]

    assert says("first", "blocks", 0) == "about 2 min left"
    assert says("first", "layers", 300) == "longer than planned; about 3 min for what follows"
    unfinished.remove("first")
    assert says("second", "blocks", 0) == "about 3 min left"
    assert says("second", "layers", 120) == "about 60 s left"
    assert says("second", "memory", 120) == "longer than planned"
