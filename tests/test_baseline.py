"""Baseline files: what is refused, and what survives a bad moment."""

import errno
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.baselines import baseline, edit, session
from pytest_fp8.baselines.atomic import updating
from pytest_fp8.baselines.check import measured_otherwise
from pytest_fp8.baselines.folder import read_folder
from pytest_fp8.baselines.metrics import QUIET_BUSY, check_agreement
from pytest_fp8.baselines.source import Folder, Revision
from pytest_fp8.baselines.store import baseline_path, held_against, read_baseline, write_baseline
from pytest_fp8.baselines.strict import MAX_BYTES, Unsound
from pytest_fp8.baselines.variance import read_components
from pytest_fp8.errors import BaselineError
from pytest_fp8.measurement import MEASUREMENT, ONE_GPU

GOOD = baseline("1b-torchao-rowwise", "abc", metrics={"speedup": [[0.1, 0.11], [0.12, 0.1]], "fp8_share": [0.78]})
LATER = session(metrics={"fp8_share": [0.8]}, date="2026-11-21", run="b" * 12)


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
        ('{"schema": 1}', "has another schema"),
        ('{"schema": 2, "case": 3}', "lacks case_hash, gpu, sessions, digest"),
        ('{"schema": 2, "schema": 2}', "the key 'schema' stands twice"),
        ('{"schema": NaN}', "NaN is no number"),
        ('{"schema": 1e999}', "too large a number"),
        ("[" * 100_000, "nested too deep"),
        ("[" * 20 + "]" * 20, "nested too deep"),
        (" " * (MAX_BYTES + 1), f"larger than {MAX_BYTES} bytes"),
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


@pytest.mark.parametrize("reading", [read, lambda folder: read_components(Folder(folder), "h200")])
def test_a_file_where_a_folder_should_be_is_no_corrupt_baseline(tmp_path, reading):
    (tmp_path / "stored").write_text("no folder")
    with pytest.raises(BaselineError) as error:
        reading(tmp_path / "stored")
    assert "cannot be read" in str(error.value)
    assert "edited by hand" not in str(error.value)
    assert error.value.next_step == f"ls -ld {tmp_path / 'stored'}"


def test_a_link_is_said_to_be_one(stored, tmp_path):
    path = baseline_path(stored, "h200", "1b-torchao-rowwise")
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BaselineError, match="not a readable baseline") as error:
        read(stored)
    assert "a symbolic link, which is not followed" in str(error.value)


def edited(folder, change, **more):
    edit(baseline_path(folder, "h200", GOOD.case), change, **more)


@pytest.mark.parametrize("name", ["case", "case_hash", "gpu", "sessions", "digest"])
def test_a_missing_or_misshapen_field_is_named(stored, name):
    edited(stored, lambda data: data.update({name: 3}), sign=name != "digest")
    with pytest.raises(BaselineError, match=f"baseline.{name} is 3, not"):
        read(stored)
    edited(stored, lambda data: data.pop(name), sign=False)
    with pytest.raises(BaselineError, match=f"the baseline lacks {name}"):
        read(stored)


ORIGIN = ["date", "commit", "dirty", "gpu", "libraries", "reason", "run", "metrics", "starts"]


@pytest.mark.parametrize("name", [*ORIGIN, "measurement"])
def test_a_missing_or_misshapen_field_of_a_session_is_named(stored, name):
    edited(stored, lambda data: data["sessions"][0].update({name: -3}))
    with pytest.raises(BaselineError, match=rf"sessions\[0\].{name} is (-3, )?not"):
        read(stored)
    edited(stored, lambda data: data["sessions"][0].pop(name))
    with pytest.raises(BaselineError, match=rf"sessions\[0\] lacks {name}"):
        read(stored)


def first(**values):
    return lambda data: data["sessions"][0].update(values)


def metrics(**values):
    return lambda data: data["sessions"][0]["metrics"].update(values)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda data: data.update(extra=1), "the baseline has unknown fields: 'extra'"),
        (first(host="mine"), r"sessions\[0\] has unknown fields: 'host'"),
        (first(tolerance=0.99), r"sessions\[0\] has unknown fields: 'tolerance'"),
        (first(date="yesterday"), "not a date like"),
        (first(date="2026-02-30"), "not a date like"),
        (first(reason="a\x1b[31mb"), "not printable text"),
        (first(reason="x" * 501), "at most 500 characters"),
        (first(unfit=None), "unfit is None, not text"),
        (first(dirty=1), "dirty is 1, not one of True, False, None"),
        (first(measurement=True), "measurement is True, not a whole number"),
        (first(starts=["speedup", "speedup"]), "starts is .* each once"),
        (first(starts=["memory_ratio"]), "starts is .* not some of the session's metrics"),
        (first(gpu={"name": "H200", "serial": "1"}), "gpu has unknown fields: 'serial'"),
        (first(libraries={"../x": "1"}), "a name in .*libraries"),
        (lambda data: data.update(sessions=[]), "has 0 values, not 1 to 8"),
        (lambda data: data.update(sessions=data["sessions"] * 9), "has 9 values, not 1 to 8"),
        (lambda data: data.update(case="../x"), "case is '../x', not text like"),
        (metrics(speedup=[0.1, 0.2]), r"speedup\[0\] is 0.1, not a list"),
        (metrics(speedup=[[]]), r"speedup\[0\] has 0 values"),
        (metrics(speedup=[[9.0], [9.0]]), r"speedup\[0\]\[0\] is 9.0, not a number from -4.6"),
        (metrics(speedup=[["0.1"], [0.1]]), r"speedup\[0\]\[0\] is '0.1', not a number"),
        (metrics(fp8_share=[1.5]), r"fp8_share\[0\] is 1.5, not a number from 0 to 1"),
        (metrics(fp8_share=[True]), r"fp8_share\[0\] is True, not a number"),
        (metrics(fp8_layers=[1.0]), r"fp8_layers\[0\] is 1.0, not a whole number"),
        (metrics(memory_ratio=[-1]), r"memory_ratio\[0\] is -1, not a number"),
        (metrics(relic=[1]), "metrics has unknown fields: 'relic'"),
        (metrics(speedup={"values": [[0.1]], "direction": "lower"}), "speedup is .* not a list"),
        (lambda data: data["sessions"][0]["metrics"].clear(), "not an object with metrics"),
        (lambda data: data["sessions"][0]["metrics"].pop("fp8_ms"), "has a speedup and lacks fp8_ms"),
        (metrics(fp8_ms=[100.0]), "another number of processes"),
        (metrics(busy_speedup=[[0.2] * 5] * 3), "busy times of 3 processes and steps of 2"),
    ],
)
def test_what_no_writer_wrote_is_refused_although_its_digest_fits(stored, change, says):
    edited(stored, change)
    with pytest.raises(BaselineError, match=says):
        read(stored)


def test_a_speedup_that_its_own_step_times_deny_is_refused(stored):
    edited(stored, metrics(speedup=[[0.05, 0.06], [0.05, 0.06]]))
    with pytest.raises(BaselineError, match=r"1.051x to 1.062x in its blocks; the step times beside it give 1.1"):
        read(stored)


@pytest.mark.parametrize(
    ("count", "beyond", "agrees"), [(3, 0.047, True), (3, 0.06, False), (8, 0.038, True), (8, 0.047, False)]
)
def test_medians_of_few_blocks_may_lie_farther_beyond_them(count, beyond, agrees):
    blocks = [0.1 + 0.01 * index / (count - 1) for index in range(count)]
    taken = {"speedup": [blocks], "bf16_ms": [100.0 * math.exp(0.11 + beyond)], "fp8_ms": [100.0]}
    if agrees:
        check_agreement(taken, "here")
    else:
        with pytest.raises(Unsound, match="the step times beside it"):
            check_agreement(taken, "here")


@pytest.mark.parametrize(
    "change",
    [metrics(fp8_share=[0.7]), first(date="2026-11-19"), lambda data: data["sessions"].append(data["sessions"][0])],
)
def test_an_edit_by_hand_shows_in_the_digest(stored, change):
    edited(stored, change, sign=False)
    with pytest.raises(BaselineError, match="was edited by hand") as error:
        read(stored)
    assert "measure again" in str(error.value)


def test_a_link_is_not_followed(stored, tmp_path):
    path = baseline_path(stored, "h200", GOOD.case)
    elsewhere = path.rename(tmp_path / "elsewhere.json")
    path.symlink_to(elsewhere)
    with pytest.raises(BaselineError, match="a symbolic link, which is not followed"):
        read(stored)
    path.unlink()
    path.parent.rmdir()
    (tmp_path / "other").mkdir()
    elsewhere.rename(tmp_path / "other" / path.name)
    path.parent.symlink_to(tmp_path / "other")
    for touch in (read, lambda folder: write_baseline(folder, GOOD)):
        with pytest.raises(BaselineError, match="is not followed"):
            touch(stored)


def test_a_pipe_or_a_folder_in_the_place_of_a_file_is_no_baseline_and_nothing_waits(tmp_path):
    path = baseline_path(tmp_path, "h200", GOOD.case)
    path.parent.mkdir()
    os.mkfifo(path)
    with pytest.raises(BaselineError, match="not a regular file"):
        read(tmp_path)
    path.unlink()
    path.mkdir()
    with pytest.raises(BaselineError, match="not a regular file"):
        read(tmp_path)


def test_a_lock_that_is_a_link_leads_nowhere(tmp_path):
    target = tmp_path / "precious"
    target.write_text("content")
    folder = tmp_path / "baselines"
    folder.mkdir()
    (folder / ".lock").symlink_to(target)
    with pytest.raises(BaselineError, match="cannot be updated"), updating(folder):
        pass
    assert target.read_text() == "content"


# -- histories ----------------------------------------------------------------------------------------------------


def test_values_are_those_of_the_newest_session_that_has_them():
    stored = replace(GOOD, sessions=(*GOOD.sessions, LATER))
    assert stored.values("fp8_share") == [0.8]
    assert stored.values("speedup") == [[0.1, 0.11], [0.12, 0.1]]
    assert stored.history("fp8_share") == [[0.78], [0.8]]


@pytest.mark.parametrize("busy", [True, False])
def test_an_update_is_held_against_nothing_and_knows_what_the_stored_one_is_gated_on(tmp_path, busy):
    speedup = {"speedup": [[0.1], [0.1]], **({"busy_speedup": [[0.2], [0.2]]} if busy else {})}
    write_baseline(tmp_path, made := baseline("1b-te-block", "abc", metrics=speedup))
    of_gate, of_update = (held_against(Folder(tmp_path), "h200", "1b-te-block", "abc", x) for x in (False, True))
    assert (of_gate, of_update) == ((made, busy), (None, busy))
    other_case = Folder(tmp_path), "h200", "1b-te-block", "defined anew"
    assert held_against(*other_case, update=True) == (None, False)
    with pytest.raises(BaselineError, match="definition"):
        held_against(*other_case, update=False)


@pytest.mark.parametrize(
    ("number", "more", "moved", "busy"),
    [
        (ONE_GPU, {}, 0, True),
        (ONE_GPU, {"bf16_wire_ms": [9.0]}, MEASUREMENT, False),
        (MEASUREMENT, {"bf16_wire_ms": [9.0]}, 0, True),
        (ONE_GPU - 1, {}, ONE_GPU, True),
        (MEASUREMENT + 1, {}, MEASUREMENT + 1, True),
        (MEASUREMENT + 1, {"bf16_wire_ms": [9.0]}, MEASUREMENT + 1, True),
    ],
)
def test_busy_times_of_several_gpus_with_waits_in_them_are_not_compared_with(number, more, moved, busy):
    metrics = {"speedup": [[0.1], [0.1]], QUIET_BUSY: [[0.1], [0.2]], **more}
    stored = replace(GOOD, sessions=(replace(GOOD.newest, measurement=number, metrics=metrics),))
    assert (QUIET_BUSY in stored.metrics) is busy
    assert bool(stored.history(QUIET_BUSY)) is busy
    assert stored.history("speedup"), "step times were taken as today"
    assert measured_otherwise(stored) == moved
    assert QUIET_BUSY in stored.to_json()["sessions"][0]["metrics"], "the file keeps what it holds"


def test_a_history_begins_where_its_level_does():
    starts = replace(LATER, starts=("fp8_share",))
    stored = replace(GOOD, sessions=(*GOOD.sessions, starts, replace(LATER, metrics={"fp8_share": [0.81]})))
    assert stored.history("fp8_share") == [[0.8], [0.81]]
    assert len(stored.history("speedup")) == 1


def test_baselines_are_read_from_a_revision_and_the_checkout_does_not_count(stored):
    (stored / "h200/_other.json").write_text("{}")
    git = ["git", "-C", str(stored), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    for arguments in (["init", "-q", "-b", "main"], ["add", "."], ["commit", "-qm", "all"]):
        subprocess.run([*git, *arguments], check=True)
    write_baseline(stored, replace(GOOD, case_hash="new"))
    assert read(Revision(stored, "main")) == GOOD
    assert read(Revision(stored, "main"), case="8b-te-block") is None
    assert Revision(stored, "main").names() == [baseline_path(Path(), "h200", GOOD.case)]
    assert Revision(stored, "main").text(Path("h200/_other.json")) == "{}", "beside the baselines, and none of them"
    baseline_path(stored, "h200", GOOD.case).unlink()
    baseline_path(stored, "h200", GOOD.case).symlink_to("/etc/passwd")
    for arguments in (["add", "."], ["commit", "-qm", "a link"]):
        subprocess.run([*git, *arguments], check=True)
    with pytest.raises(BaselineError, match="not a regular file"):
        read(Revision(stored, "HEAD"))
    for revision in ("nowhere", "--output=x"):
        with pytest.raises(BaselineError, match="cannot be read"):
            read(Revision(stored, revision))


def test_what_only_looks_like_a_baseline_is_named_and_not_left_out(stored, tmp_path):
    (stored / "h200/8b-te-block.json").mkdir()
    (stored / "h200/8b-te-block.json/inner.txt").write_text("")
    (tmp_path / "elsewhere").mkdir()
    write_baseline(tmp_path / "elsewhere", replace(GOOD, gpu="h100"))
    (stored / "h100").symlink_to(tmp_path / "elsewhere/h100")
    files = read_folder(stored)
    good = baseline_path(Path(), "h200", GOOD.case)
    assert {str(path) for path, found in files.items() if isinstance(found, BaselineError)} == {
        "h100",
        "h200/8b-te-block.json",
    }
    assert files[good] == GOOD


def test_a_baseline_of_another_gpu_is_never_compared_with(stored):
    (stored / "h100").mkdir()
    os.rename(baseline_path(stored, "h200", GOOD.case), baseline_path(stored, "h100", GOOD.case))
    with pytest.raises(BaselineError, match="another GPU") as error:
        read(stored, gpu="h100")
    assert f"pytest-fp8 suites -k {GOOD.case} --fp8-gpu=h100 --fp8-update-baselines" in error.value.next_step


def test_a_case_of_ones_own_is_measured_by_pytest(tmp_path):
    own = replace(GOOD, case="own-torchao-tensorwise")
    write_baseline(tmp_path, own)
    (tmp_path / "h100").mkdir()
    os.rename(baseline_path(tmp_path, "h200", own.case), baseline_path(tmp_path, "h100", own.case))
    with pytest.raises(BaselineError) as error:
        read_baseline(tmp_path, "h100", own.case, own.case_hash)
    assert f": pytest -k {own.case} --fp8-gpu=h100 --fp8-update-baselines" in error.value.next_step


def test_a_candidate_that_was_not_fit_to_be_stored_is_never_compared_with(tmp_path):
    write_baseline(tmp_path, replace(GOOD, sessions=(replace(LATER, unfit="the loss question failed"),)))
    with pytest.raises(BaselineError, match="holds a session that was not fit to be stored"):
        read(tmp_path)


def test_a_renamed_baseline_is_never_compared_with(stored):
    os.rename(baseline_path(stored, "h200", GOOD.case), baseline_path(stored, "h200", "8b-te-block"))
    with pytest.raises(BaselineError, match="another case"):
        read(stored, case="8b-te-block")


def test_a_case_that_was_redefined_is_never_compared_with(stored):
    with pytest.raises(BaselineError, match="another definition of case") as error:
        read(stored, case_hash="def")
    assert "pytest-fp8 suites -k 1b-torchao-rowwise --fp8-gpu=h200" in str(error.value)


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
    assert error.value.headline == f"could not write {path}: " + ("it is a folder" if is_folder else "Not a directory")
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
        result = pytester.runpytest("--fp8-update-baselines", "--fp8-reason=x")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*another run is updating the baselines*"])
