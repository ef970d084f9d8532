"""Baseline files: what is written comes back, what no writer wrote is refused, and a bad moment loses nothing."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.baselines import GOOD, LATER, baseline, edit, read
from helpers.mutants import mutants
from pytest_fp8.baselines.record import to_text
from pytest_fp8.baselines.store import (
    Folder,
    baseline_path,
    held_against,
    load_baseline,
    read_folder,
    write_baseline,
)
from pytest_fp8.codes import B
from pytest_fp8.errors import BaselineError
from pytest_fp8.plain import strict_json

ROOT = Path(__file__).parents[2]
FILE = baseline_path(Path(), "h200", GOOD.case)
FIELDS = strict_json(to_text(GOOD))


@pytest.fixture
def stored(tmp_path):
    write_baseline(tmp_path, GOOD)
    return tmp_path


def refused(folder, **asked):
    with pytest.raises(BaselineError) as error:
        read(folder, **asked)
    return error.value


def test_what_is_written_is_read(stored):
    assert read(stored) == GOOD
    odd = replace(GOOD, sessions=(replace(GOOD.newest, reason='"\u2028{é\n', metrics={"loss_gap": [-1e-17, 1 / 3]}),))
    write_baseline(stored, odd)
    assert read(stored) == odd
    write_baseline(stored, GOOD)
    assert read(stored).values("speedup") == [[0.1, 0.11], [0.12, 0.1]]
    assert read(stored).values("memory_ratio") == []
    assert read(stored, case="8b-te-block") is None


@pytest.mark.parametrize("text", ["\x00\xff", '{"schema": 99}', '{"schema": NaN}'])
def test_a_corrupt_file_is_named(stored, text):
    (stored / FILE).write_text(text, encoding="latin-1")
    error = refused(stored)
    assert (error.code, str(stored / FILE) in error.headline) == (B.UNREADABLE, True)


@pytest.mark.parametrize("name", [*FIELDS, *(f"sessions.{name}" for name in FIELDS["sessions"][0])])
def test_a_field_that_is_missing_or_of_another_kind_is_named(stored, name):
    *inside, name = name.split(".")

    def part(data):
        return data["sessions"][0] if inside else data

    edit(stored / FILE, lambda data: part(data).update({name: 3.5}), sign=name != "digest")
    assert name in refused(stored).seen
    edit(stored / FILE, lambda data: part(data).pop(name), sign=name != "digest")
    assert f"lacks '{name}'" in refused(stored).seen
    write_baseline(stored, GOOD)
    edit(stored / FILE, lambda data: part(data).update(unknown=1))
    assert "has no field 'unknown'" in refused(stored).seen


@pytest.mark.parametrize(
    ("metric", "values"),
    [
        ("speedup", [0.1, 0.2]),
        ("speedup", [[9.0], [9.0]]),
        ("fp8_share", [1.5]),
        ("fp8_share", [True]),
        ("relic", [1]),
    ],
)
def test_figures_that_no_session_measures_are_refused_although_the_digest_fits(stored, metric, values):
    edit(stored / FILE, lambda data: data["sessions"][0]["metrics"].update({metric: values}))
    assert metric in refused(stored).seen


@pytest.mark.parametrize("count", [0, 9])
def test_a_file_has_one_to_eight_sessions(stored, count):
    edit(stored / FILE, lambda data: data.update(sessions=data["sessions"] * count))
    assert f"has {count} values, not 1 to 8" in refused(stored).seen


def test_a_changed_file_is_refused_or_reads_as_the_untouched_one(tmp_path):
    original = ROOT / "baselines/h200/1b-torchao-tensorwise.json"
    true, path = load_baseline(original), tmp_path / "h200" / original.name
    path.parent.mkdir()
    for way, data in mutants(original.read_text(), 200, seed=1):
        path.write_bytes(data)
        try:
            found = load_baseline(path)
        except BaselineError:
            continue
        # Who signs an edit can make it fit: that is what diff shows.
        assert way == "signed" or found == true


def test_a_baseline_of_another_gpu_case_or_definition_is_never_compared_with(stored):
    assert refused(stored, case_hash="def").code is B.REDEFINED
    for gpu, case in (("h100", GOOD.case), ("h200", "8b-te-block")):
        path = baseline_path(stored, gpu, case)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes((stored / FILE).read_bytes())
        assert f"the baseline of h200/{GOOD.case}" in refused(stored, gpu=gpu, case=case).seen


def test_a_level_has_its_own_history_and_busy_times_are_no_older_than_that_of_step_time():
    two = replace(GOOD, sessions=(*GOOD.sessions, LATER))
    assert (two.values("fp8_share"), two.values("speedup")) == ([0.8], [[0.1, 0.11], [0.12, 0.1]])
    assert two.history("fp8_share") == [[0.78], [0.8]]
    moved = replace(GOOD, sessions=(*GOOD.sessions, replace(LATER, starts=("fp8_share",))))
    assert (moved.history("fp8_share"), len(moved.history("speedup"))) == ([[0.8]], 1)
    speedup, busy = {"speedup": [[0.1], [0.1]]}, {"busy_speedup": [[0.2], [0.2]]}
    first = replace(GOOD.newest, metrics={**speedup, **busy}, starts=())
    moved, again = replace(first, metrics=speedup, starts=("speedup",)), replace(first, metrics={**speedup, **busy})
    assert replace(GOOD, sessions=(first, moved)).history("busy_speedup") == []
    assert len(replace(GOOD, sessions=(first, moved, again)).history("busy_speedup")) == 1


@pytest.mark.parametrize("busy", [True, False])
def test_an_update_is_held_against_nothing_and_knows_what_the_stored_one_is_gated_on(tmp_path, busy):
    made = baseline("1b-te-block", "abc", metrics={"speedup": [[0.1], [0.1]], "busy_speedup": [[0.2], [0.2]]})
    made = replace(made, sessions=(replace(made.newest, host_bound=busy),))
    write_baseline(tmp_path, made)
    assert made.gated == ("busy_speedup" if busy else "speedup")
    of_gate, of_update = (held_against(Folder(tmp_path), "h200", "1b-te-block", "abc", x) for x in (False, True))
    assert (of_gate, of_update) == ((made, busy), (None, busy))
    assert held_against(Folder(tmp_path), "h200", "1b-te-block", "defined anew", update=True) == (None, False)


def test_baselines_are_read_from_a_revision_and_the_checkout_does_not_count(stored):
    git = ["git", "-C", str(stored), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    (stored / "h200/8b-te-block.json").symlink_to("/etc/passwd")
    for arguments in (["init", "-q", "-b", "main"], ["add", "."], ["commit", "-qm", "all"]):
        subprocess.run([*git, *arguments], check=True)
    write_baseline(stored, replace(GOOD, case_hash="new"))
    assert read(Folder(stored, "main")) == GOOD
    assert read(Folder(stored, "main"), case="8b-te-block") is None, "a link is no file of the revision"
    assert Folder(stored, "main").names() == [FILE]
    for revision in ("nowhere", "--output=x"):
        assert refused(Folder(stored, revision)).code is B.NO_REVISION


def test_what_only_looks_like_a_baseline_is_named_and_not_left_out(stored):
    (stored / "h200/8b-te-block.json").mkdir()
    (stored / "h200/_notes.json").write_text("{")
    files = read_folder(stored)
    assert {str(path) for path, each in files.items() if isinstance(each, BaselineError)} == {"h200/8b-te-block.json"}
    assert files[FILE] == GOOD


# -- writing ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["tempfile.mkstemp", "os.fsync", "os.replace"])
def test_a_full_disk_at_any_step_loses_nothing(stored, monkeypatch, step):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(step, full)
        with pytest.raises(BaselineError, match=r"could not write .*1b-torchao-rowwise\.json") as error:
            write_baseline(stored, replace(GOOD, case_hash="new"))
    assert error.value.code is B.NOT_WRITTEN
    assert ".tmp" not in str(error.value), "the hidden file is gone"
    assert read(stored) == GOOD
    assert [path.name for path in (stored / "h200").iterdir()] == [FILE.name], "nothing half-written"


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_writer_that_is_killed_leaves_the_old_file_or_the_new_one(stored, step):
    child = os.fork()
    if child == 0:
        setattr(os, step, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        write_baseline(stored, replace(GOOD, case_hash="new"))
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert read(stored) == GOOD
    assert list(read_folder(stored)) == [FILE], "what is unfinished is no baseline"
    write_baseline(stored, replace(GOOD, case_hash="new"))
