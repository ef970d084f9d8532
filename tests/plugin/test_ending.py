"""What a session or a process leaves behind that ends, is told to end or is killed: its arms, its report, and its one
temporary folder, which the next start sweeps."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time

import pytest

from helpers.arms import all_end, ends, running
from pytest_fp8.arms import scratch
from pytest_fp8.ending import Endings
from pytest_fp8.report.files import read_report

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


@pytest.mark.slow
@pytest.mark.nightly_beyond(1)
@pytest.mark.parametrize(
    ("number", "options"),
    [
        (signal.SIGTERM, ()),
        (signal.SIGTERM, ("-n1",)),
        (signal.SIGINT, ()),
        pytest.param(signal.SIGINT, ("-n1",), marks=pytest.mark.oldest),
        (signal.SIGKILL, ("-n1",)),
    ],
)
def test_a_session_that_is_told_to_end_or_whose_controller_is_killed_leaves_a_report_alone(
    pytester, temporary, number, options
):
    session, pids = started(pytester, temporary, *options)
    session.send_signal(number)
    out, _ = session.communicate(timeout=60)
    if number is not signal.SIGKILL:
        assert session.returncode == 2
        assert "micro-torchao-tensorwise-emulated" in out, "the table is shown"
    assert number is not signal.SIGTERM or "Ended: SIGTERM" in out
    assert reported(pytester) == {"layers": "PASS"}
    assert all_end(*pids)
    if number is signal.SIGKILL:
        ends(lambda: bool(left_in(temporary)), 15)
    assert left_in(temporary) == []


@pytest.mark.slow
def test_no_arm_outlives_a_parent_that_was_killed(temporary):
    """A fork, and an interpreter of its own."""
    arms = "from pytest_fp8.arms.process import ArmProcess; arms = [ArmProcess(fork=fork) for fork in (True, False)]; "
    pids = run(temporary, arms + "print(*(arm.pid for arm in arms), flush=True); " + KILLED).stdout.split()
    assert len(set(pids)) == 2
    assert all_end(*pids)


def test_a_lost_terminal_ends_a_session_as_sigterm_does_and_nothing_keeps_it_from_writing_what_it_knows():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    endings = Endings()
    endings.take()
    try:
        with pytest.raises(KeyboardInterrupt, match="SIGHUP"):
            os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        endings.give_back()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


# -- the one temporary folder of a process ----------------------------------------------------------------------------

MAKE = "from pytest_fp8.arms.scratch import new_folder; made = new_folder('arm-'); (made / 'log').touch(); "
KILLED = "import os; os.kill(os.getpid(), 9)"


def run(base, code):
    env = {**os.environ, "TMPDIR": str(base)}
    return subprocess.run([sys.executable, "-c", code], env=env, check=False, capture_output=True, text=True)


@pytest.mark.parametrize(
    "then",
    [
        "print(made.exists())",
        "import os, sys; child = os.fork(); child or sys.exit(); os.waitpid(child, 0); print(made.exists())",
        "import shutil; shutil.rmtree(made.parent); new = new_folder('arm-'); print(new.exists() and new != made)",
    ],
    ids=["one", "a fork does not take it along", "deleted and made anew"],
)
def test_it_is_there_and_gone_when_the_process_has_ended(tmp_path, then):
    done = run(tmp_path, MAKE + then)
    assert (done.stdout, done.stderr) == ("True\n", "")
    assert os.listdir(tmp_path) == []


@pytest.fixture
def waiting(tmp_path):
    """A process that has its folder, and waits."""
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", MAKE + "print(made, flush=True); input()"], env=env, **pipes)
    assert os.path.isdir(process.stdout.readline().strip())
    yield process
    process.kill()
    process.communicate()


def test_the_next_start_removes_what_a_killed_process_left_and_no_living_ones(tmp_path, waiting):
    run(tmp_path, MAKE + KILLED)
    assert len(os.listdir(tmp_path)) == 2
    run(tmp_path, MAKE)
    (left,) = os.listdir(tmp_path)
    assert os.path.exists(next((tmp_path / left).iterdir()) / "log")
    waiting.communicate("\n")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("names", "is_an_arm_s"), [("PYTEST_FP8_ARM", True), ("OLDPWD", False)], ids=["an arm's", "a shell that looked in"]
)
def test_the_next_start_ends_what_an_arm_of_a_killed_process_left_running_and_nothing_else(
    tmp_path, names, is_an_arm_s
):
    start = f"import os, subprocess; env = {{**os.environ, '{names}': str(made), 'PYTEST_FP8_ARMS': str(made)}}; "
    start += "quiet = dict.fromkeys(('stdout', 'stderr'), subprocess.DEVNULL); "
    start += "print(subprocess.Popen(['sleep', '600'], start_new_session=True, env=env, **quiet).pid, flush=True); "
    pid = int(run(tmp_path, MAKE + start + KILLED).stdout)
    try:
        assert running(pid)
        run(tmp_path, MAKE)
        assert os.listdir(tmp_path) == []
        assert all_end(pid) if is_an_arm_s else running(pid)
    finally:
        if not is_an_arm_s:
            os.kill(pid, signal.SIGKILL)


def test_only_real_folders_of_such_a_name_are_swept(tmp_path, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "mine").touch()
    run(tmp_path, MAKE + KILLED)
    (killed,) = os.listdir(tmp_path)
    (tmp_path / killed / "out").symlink_to(elsewhere)
    prefix = killed[:-8]
    assert prefix.startswith(scratch.OURS)
    (tmp_path / f"{prefix}a_link__").symlink_to(elsewhere)
    (tmp_path / f"{prefix}a_file__").touch()
    (tmp_path / f"{prefix}my-notes").mkdir()
    run(tmp_path, MAKE)
    assert sorted(os.listdir(tmp_path)) == sorted(f"{prefix}{name}" for name in ("a_link__", "a_file__", "my-notes"))
    assert (elsewhere / "mine").exists()


@pytest.mark.parametrize(("length", "fit"), [(20, True), (75, True), (76, False), (200, False)])
def test_sockets_need_a_short_name(tmp_path, length, fit):
    assert scratch.sockets_fit(tmp_path / ("/" + "x" * (length - 1))) == fit
