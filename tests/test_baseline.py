"""Baseline files: what is refused, and what survives a bad moment."""

import errno
import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from helpers.baselines import ORIGIN
from pytest_fp8.baselines.atomic import updating
from pytest_fp8.baselines.store import Baseline, baseline_path, read_baseline, write_baseline
from pytest_fp8.errors import BaselineError

GOOD = Baseline(
    "1b-torchao-rowwise",
    "abc",
    "h200",
    {"speedup": {"unit": "log ratio", "direction": "higher", "tolerance": 0.03, "values": [[0.1, 0.11], [0.12, 0.1]]}},
    ORIGIN,
)


@pytest.fixture
def stored(tmp_path):
    write_baseline(tmp_path, GOOD)
    return tmp_path


def read(folder, gpu="h200", case="1b-torchao-rowwise", case_hash="abc"):
    return read_baseline(folder, gpu, case, case_hash)


def test_what_is_written_is_read(stored):
    assert read(stored) == GOOD
    assert read(stored).values("speedup") == [[0.1, 0.11], [0.12, 0.1]]
    assert read(stored).values("memory_ratio") == []


def test_a_case_without_one_has_none(tmp_path):
    assert read(tmp_path) is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not a readable baseline"),
        ("[]", "not an object"),
        ("\x00\xff", "not a readable baseline"),
        ('{"schema": 99}', "has another schema"),
        ('{"schema": 1, "case": 3}', "lacks case_hash, gpu, metrics, provenance"),
    ],
)
def test_a_corrupt_file_is_named(stored, text, says):
    path = baseline_path(stored, "h200", "1b-torchao-rowwise")
    path.write_text(text, encoding="latin-1")
    with pytest.raises(BaselineError) as error:
        read(stored)
    assert str(path) in str(error.value)
    assert says in str(error.value)
    assert "next:" in str(error.value)


def edited(folder, change):
    """The stored file after ``change`` was done to its data."""
    path = baseline_path(folder, "h200", GOOD.case)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


@pytest.mark.parametrize("name", ["case", "case_hash", "gpu", "metrics", "provenance"])
def test_a_missing_or_misshapen_field_is_named(stored, name):
    edited(stored, lambda data: data.update({name: 3}))
    with pytest.raises(BaselineError, match=f"'{name}' is 3, not"):
        read(stored)
    edited(stored, lambda data: data.pop(name))
    with pytest.raises(BaselineError, match=f"the baseline lacks {name}"):
        read(stored)


@pytest.mark.parametrize("name", ["date", "commit", "dirty", "gpu", "libraries", "reason"])
def test_a_missing_or_misshapen_origin_is_named(stored, name):
    edited(stored, lambda data: data["provenance"].update({name: 3}))
    with pytest.raises(BaselineError, match=f"'{name}' is 3, not"):
        read(stored)
    edited(stored, lambda data: data["provenance"].pop(name))
    with pytest.raises(BaselineError, match=f"provenance lacks {name}"):
        read(stored)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda data: data.update(extra=1), "the baseline has unknown fields: extra"),
        (lambda data: data["provenance"].update(host="mine"), "provenance has unknown fields: host"),
        (lambda data: data["metrics"]["speedup"].update(band=1), "metric 'speedup' has unknown fields: band"),
        (lambda data: data["provenance"].update(date="yesterday"), "Invalid isoformat"),
        (lambda data: data["provenance"].update(unfit=None), "'unfit' is None, not text"),
        (lambda data: data["provenance"].update(kept={"speedup": {"date": "2026-11-20"}}), "'speedup' lacks commit"),
        (lambda data: data["provenance"].update(kept={"speedup": 3}), "'speedup' is 3, not an object"),
    ],
)
def test_what_no_writer_wrote_is_refused(stored, change, says):
    edited(stored, change)
    with pytest.raises(BaselineError, match=says):
        read(stored)


@pytest.mark.parametrize(
    "metric",
    [
        {"values": [1]},
        {"unit": "", "direction": "", "tolerance": 0, "values": []},
        {"unit": "", "direction": "", "tolerance": 0, "values": 3},
        3,
    ],
)
def test_a_metric_that_lost_a_field_is_named(stored, metric):
    edited(stored, lambda data: data["metrics"].update(speedup=metric))
    with pytest.raises(BaselineError, match="speedup"):
        read(stored)


def test_a_baseline_of_another_gpu_is_never_compared_with(stored):
    (stored / "h100").mkdir()
    os.rename(baseline_path(stored, "h200", GOOD.case), baseline_path(stored, "h100", GOOD.case))
    with pytest.raises(BaselineError, match="another GPU"):
        read(stored, gpu="h100")


def test_a_renamed_baseline_is_never_compared_with(stored):
    os.rename(baseline_path(stored, "h200", GOOD.case), baseline_path(stored, "h200", "8b-te-block"))
    with pytest.raises(BaselineError, match="another case"):
        read(stored, case="8b-te-block")


def test_a_case_that_was_redefined_is_never_compared_with(stored):
    with pytest.raises(BaselineError, match="another definition of case") as error:
        read(stored, case_hash="def")
    assert "pytest suites -k 1b-torchao-rowwise --fp8-gpu=h200" in str(error.value)


def test_an_own_model_s_hash_that_never_stays_is_explained(tmp_path):
    write_baseline(tmp_path, replace(GOOD, case="own.net-torchao-rowwise"))
    with pytest.raises(BaselineError, match="each run has another hash") as error:
        read(tmp_path, case="own.net-torchao-rowwise", case_hash="def")
    assert "pytest -k own.net-torchao-rowwise --fp8-gpu=h200" in str(error.value)


def test_an_emulated_case_is_measured_again_without_a_declared_gpu(tmp_path):
    write_baseline(tmp_path, replace(GOOD, gpu="emulated"))
    with pytest.raises(BaselineError) as error:
        read_baseline(tmp_path, "emulated", GOOD.case, "def")
    assert "--fp8-gpu" not in str(error.value)
    assert f"-k {GOOD.case} --fp8-update-baselines" in str(error.value)


@pytest.mark.parametrize("name", ["../../etc/passwd", "a/b", "", ".hidden", "x\n"])
def test_a_name_cannot_leave_the_folder(tmp_path, name):
    with pytest.raises(BaselineError, match="cannot name a baseline"):
        baseline_path(tmp_path, "h200", name)


@pytest.mark.parametrize("step", ["tempfile.NamedTemporaryFile", "os.fsync", "os.fchmod", "os.replace"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_full_disk_at_any_step_loses_nothing(stored, monkeypatch, step, code):
    def full(*args, **kwargs):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patched:
        patched.setattr(step, full)
        with pytest.raises(BaselineError, match=r"could not write .*1b-torchao-rowwise\.json"):
            write_baseline(stored, replace(GOOD, case_hash="new"))
    assert read(stored) == GOOD
    assert [path.name for path in (stored / "h200").iterdir()] == ["1b-torchao-rowwise.json"], "nothing half-written"


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
        result = pytester.runpytest("--fp8-update-baselines", "--fp8-reason=x")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*another run is updating the baselines*"])
