"""The one temporary folder of a process: gone when it ends, swept where it was killed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from helpers.arms import all_end
from helpers.arms import running as is_running
from pytest_fp8.arms import scratch

MAKE = "from pytest_fp8.arms.scratch import new_folder; made = new_folder('arm-'); (made / 'log').touch(); "
WAIT = MAKE + "print(made, flush=True); input()"


@pytest.fixture
def base(tmp_path):
    return tmp_path


def run(base, code, **options):
    env = {**os.environ, "TMPDIR": str(base)}
    return subprocess.run([sys.executable, "-c", code], env=env, check=False, capture_output=True, text=True, **options)


@pytest.fixture
def running(base):
    """A process that has its folder, and waits."""
    env = {**os.environ, "TMPDIR": str(base)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", WAIT], env=env, **pipes)
    assert os.path.isdir(process.stdout.readline().strip())
    yield process
    process.kill()
    process.communicate()


def test_it_is_gone_when_the_process_has_ended(base):
    done = run(base, MAKE + "print(made.exists())")
    assert (done.stdout, done.stderr) == ("True\n", "")
    assert os.listdir(base) == []


def test_the_next_start_removes_what_a_killed_process_left_and_no_living_ones(base, running):
    run(base, MAKE + "import os; os.kill(os.getpid(), 9)")
    assert len(os.listdir(base)) == 2
    run(base, MAKE)
    (left,) = os.listdir(base)
    assert os.path.exists(next((base / left).iterdir()) / "log")
    running.communicate("\n")
    assert os.listdir(base) == []


def test_the_next_start_ends_what_an_arm_of_a_killed_process_left_running(base):
    start = "import os, subprocess; env = {**os.environ, 'PYTEST_FP8_ARM': str(made)}; "
    start += "null = dict.fromkeys(('stdout', 'stderr'), subprocess.DEVNULL); "
    start += "print(subprocess.Popen(['sleep', '600'], start_new_session=True, env=env, **null).pid, flush=True); "
    pid = int(run(base, MAKE + start + "os.kill(os.getpid(), 9)").stdout)
    assert is_running(pid)
    run(base, MAKE)
    assert all_end(pid)


def test_a_shell_in_which_somebody_has_looked_at_the_folder_is_left_alone(base):
    start = "import os, subprocess; env = {**os.environ, 'OLDPWD': str(made), 'PYTEST_FP8_ARMS': str(made)}; "
    start += "print(subprocess.Popen(['sleep', '600'], env=env, stdout=-3, stderr=-3).pid, flush=True); "
    pid = int(run(base, MAKE + start + "os.kill(os.getpid(), 9)").stdout)
    try:
        run(base, MAKE)
        assert os.listdir(base) == []
        assert is_running(pid)
    finally:
        os.kill(pid, 9)


def test_only_real_folders_of_such_a_name_are_swept(base, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "mine").touch()
    run(base, MAKE + "import os; os.kill(os.getpid(), 9)")
    (killed,) = os.listdir(base)
    (base / killed / "out").symlink_to(elsewhere)
    prefix = killed[:-8]
    assert prefix.startswith(scratch.OURS)
    (base / f"{prefix}a_link__").symlink_to(elsewhere)
    (base / f"{prefix}a_file__").touch()
    (base / f"{prefix}my-notes").mkdir()
    run(base, MAKE)
    assert sorted(os.listdir(base)) == sorted(f"{prefix}{name}" for name in ("a_link__", "a_file__", "my-notes"))
    assert (elsewhere / "mine").exists()


def test_a_fork_of_the_process_does_not_take_its_folder_along(base):
    fork = "import os, sys; child = os.fork(); child or sys.exit(); os.waitpid(child, 0); print(made.exists())"
    assert run(base, MAKE + fork).stdout == "True\n"


def test_a_folder_that_somebody_deleted_is_made_anew(base):
    again = (
        "import shutil; shutil.rmtree(made.parent); again = new_folder('arm-'); print(again.exists(), again != made)"
    )
    done = run(base, MAKE + again)
    assert (done.stdout, done.stderr) == ("True True\n", "")
    assert os.listdir(base) == []


@pytest.mark.parametrize(("length", "fit"), [(20, True), (75, True), (76, False), (200, False)])
def test_sockets_need_a_short_name(tmp_path, length, fit):
    assert scratch.sockets_fit(tmp_path / ("/" + "x" * (length - 1))) == fit
