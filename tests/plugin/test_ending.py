"""SIGTERM, SIGHUP and SIGKILL: what a session that is told to end, or is killed, leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time

import pytest

from helpers.arms import all_end, ends
from pytest_fp8.ending import Endings
from pytest_fp8.report.files import read_report

pytestmark = pytest.mark.slow

SUITE = """
    import os, time
    import pytest
    from pytest_fp8 import Case

    CASE = dict(cases=[Case("micro", "torchao", "tensorwise", emulated=True)])

    @pytest.mark.fp8(**CASE, question="layers")
    def test_layers(fp8_pair):
        fp8_pair.assert_layers()
        arms = (fp8_pair.fp8, fp8_pair.bf16)
        with open("pids", "w") as file:
            print(*(arm.call(lambda model: os.getpid()) for arm in arms), file=file)

    @pytest.mark.fp8(**CASE, question="loss")
    def test_long(fp8_pair):
        open("there", "w").close()
        fp8_pair.fp8.call(lambda model: time.sleep(600))
"""


@pytest.fixture
def temporary():
    """Short: where a socket's name has no room, arms start more slowly."""
    with tempfile.TemporaryDirectory() as folder:
        yield folder


def started(pytester, temporary, *options):
    """A session that is in the middle of its second test, and the pids of its arms."""
    pytester.makepyfile(SUITE)
    env = {**os.environ, "TMPDIR": temporary}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--fp8-report=out", *options]
    session = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env, start_new_session=True)
    deadline = time.monotonic() + 120
    while not (pytester.path / "there").exists() and session.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert session.poll() is None, session.communicate()[0]
    time.sleep(0.5)
    return session, (pytester.path / "pids").read_text().split()


def left_in(temporary):
    """Without what torch compiled, which is kept for the next run, and pytest's own folder."""
    return [name for name in os.listdir(temporary) if not name.startswith(("torchinductor_", "pytest-of-"))]


def reported(pytester):
    report = read_report(pytester.path / "out")
    assert report.partial
    (row,) = report.entries.values()
    return {question: said.verdict for question, said in row.decisions.items()}


@pytest.mark.nightly_beyond(1)
@pytest.mark.parametrize(
    ("number", "options"),
    [
        (signal.SIGTERM, ()),
        pytest.param(signal.SIGTERM, ("-n1",), marks=pytest.mark.nightly),
        pytest.param(signal.SIGINT, (), marks=pytest.mark.nightly),
        pytest.param(signal.SIGINT, ("-n1",), marks=pytest.mark.oldest),
    ],
)
def test_a_signal_ends_the_session_as_ctrl_c_does(pytester, temporary, number, options):
    session, pids = started(pytester, temporary, *options)
    session.send_signal(number)
    out, _ = session.communicate(timeout=60)
    assert session.returncode == 2
    assert "micro-torchao-tensorwise-emulated" in out, "the table is shown"
    assert number is signal.SIGINT or f"Ended: {number.name}" in out
    assert reported(pytester) == {"layers": "PASS"}
    assert all_end(*pids)
    assert left_in(temporary) == []


@pytest.mark.nightly
def test_a_controller_that_is_killed_takes_its_workers_along_and_they_leave_nothing(pytester, temporary):
    session, pids = started(pytester, temporary, "-n1")
    os.kill(session.pid, signal.SIGKILL)
    session.communicate(timeout=60)
    assert reported(pytester) == {"layers": "PASS"}
    assert all_end(*pids)
    ends(lambda: bool(left_in(temporary)), 15)
    assert left_in(temporary) == []


def test_no_arm_outlives_a_parent_that_was_killed():
    """A fork, and an interpreter of its own."""
    code = """
        import os, signal
        from pytest_fp8.arms.process import ArmProcess
        arms = [ArmProcess(fork=fork) for fork in (True, False)]
        print(*(arm.pid for arm in arms), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    pids = done.stdout.split()
    assert len(set(pids)) == 2
    assert all_end(*pids)


def test_what_a_lost_terminal_sends_goes_the_way_of_sigterm(capsys):
    endings = Endings()
    endings.take()
    try:
        with pytest.raises(KeyboardInterrupt, match="SIGHUP"):
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        endings.give_back()


def test_nothing_keeps_a_session_that_ends_from_writing_what_it_knows():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    endings = Endings()
    endings.take()
    try:
        endings.ignore()
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        endings.give_back()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
