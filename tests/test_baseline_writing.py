"""Baseline files that are written: a bad moment loses nothing, and no two updates run at once."""

import errno
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from helpers.good_baseline import GOOD, read
from pytest_fp8.baselines.atomic import updating
from pytest_fp8.baselines.store import write_baseline
from pytest_fp8.errors import BaselineError


@pytest.fixture
def stored(tmp_path):
    write_baseline(tmp_path, GOOD)
    return tmp_path


@pytest.mark.parametrize("step", ["tempfile.NamedTemporaryFile", "os.fsync", "os.fchmod", "os.replace"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_full_disk_at_any_step_loses_nothing(stored, monkeypatch, step, code):
    def full(*args, **kwargs):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patched:
        patched.setattr(step, full)
        with pytest.raises(BaselineError, match=r"could not write .*1b-torchao-rowwise\.json") as error:
            write_baseline(stored, replace(GOOD, case_hash="new"))
    assert error.value.headline.endswith(f"/1b-torchao-rowwise.json: {os.strerror(code)}"), "the system's own reason"
    assert ".tmp" not in str(error.value), "the hidden file is gone"
    assert read(stored) == GOOD
    assert [path.name for path in (stored / "h200").iterdir()] == ["1b-torchao-rowwise.json"], "nothing half-written"


@pytest.mark.parametrize("is_folder", [True, False])
def test_a_folder_and_a_file_that_take_each_other_s_place_are_named(tmp_path, is_folder):
    path = tmp_path / "h200/1b-torchao-rowwise.json"
    if is_folder:
        path.mkdir(parents=True)
    else:
        path.parent.touch()
    with pytest.raises(BaselineError) as error:
        write_baseline(tmp_path, GOOD)
    assert error.value.headline == f"could not write {path}: " + ("Is a directory" if is_folder else "File exists")
    assert error.value.next_step
    assert list(tmp_path.rglob("*.tmp")) == []


def test_two_updates_at_once_the_second_is_told(tmp_path):
    with updating(tmp_path), pytest.raises(BaselineError, match="another run is updating"), updating(tmp_path):
        pass
    with updating(tmp_path):
        pass


def test_an_updater_that_was_killed_leaves_no_lock(tmp_path):
    code = (
        "import os, sys, signal\nfrom pathlib import Path\nfrom pytest_fp8.baselines.atomic import updating\n"
        "with updating(Path(sys.argv[1])):\n    os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == -9
    with updating(tmp_path):
        pass


def test_a_second_update_run_is_a_usage_error_at_its_start(pytester):
    with updating(pytester.path / "baselines"):
        result = pytester.runpytest("--fp8-update=x")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*another run is updating the baselines*"])
