"""``pytest-fp8 baselines promote``: which candidates become baselines, and which are refused."""

from __future__ import annotations

import errno
import os
from dataclasses import replace

import pytest

from helpers.baselines import edit
from helpers.project import CASE, TIMED, baseline, commands_in, project_in
from pytest_fp8 import Case
from pytest_fp8.baselines.store import read_baseline, write_baseline


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return project_in(tmp_path)


@pytest.fixture
def run(project, capsys):
    return commands_in(capsys)


def test_a_reviewed_candidate_becomes_the_baseline_with_a_reason(run, project):
    write_baseline(project / "out/candidates", baseline(memory=0.7, reason="", run="c" * 12))
    code, out, _ = run("promote", "out/candidates", "--reason", "copies freed")
    assert code == 0
    assert "0.850x -> 0.700x" in out
    stored = read_baseline(project / "baselines", "h200", CASE.id, CASE.digest())
    assert stored.values("memory_ratio") == [0.7]
    assert [session.reason for session in stored.sessions] == ["first", "copies freed"]
    assert len(stored.history("speedup")) == 2
    assert stored.history("memory_ratio") == [[0.7]]
    assert run("promote", "out/candidates", "--reason", "again")[:2] == (1, "")


def test_an_unfit_candidate_is_refused(run, project):
    before = (project / "baselines/h200/1b-torchao-rowwise.json").read_bytes()
    write_baseline(project / "out/candidates", baseline(memory=0.7, unfit="FP8 was not shown to run"))
    code, _, err = run("promote", "out/candidates", "--reason", "please")
    assert code == 1
    assert "FP8 was not shown to run" in err
    assert (project / "baselines/h200/1b-torchao-rowwise.json").read_bytes() == before


def test_a_candidate_that_an_update_would_refuse_is_refused(run, project):
    path = write_baseline(project / "out/candidates", baseline(date="2026-11-21", run="c" * 12))
    edit(path, lambda data: [v.pop() for n, v in data["sessions"][0]["metrics"].items() if n in TIMED])
    code, _, err = run("promote", "out/candidates", "--reason", "please")
    assert code == 1
    assert "its speedup stands on one process" in err


def test_a_promotion_of_a_case_without_candidate_is_refused(run, project):
    write_baseline(project / "out/candidates", baseline(memory=0.7))
    code, _, err = run("promote", "out/candidates", "--reason", "x", "--case", "8b-te-block")
    assert code == 2
    assert "no candidate of case '8b-te-block'" in err
    assert "next:     pytest-fp8 baselines list --dir out/candidates" in err
    assert run("promote", "out/candidates", "--reason", "x", "--case", "h100/1b-torchao-rowwise")[0] == 2
    assert (
        "no candidate" not in run("promote", "out/candidates", "--reason", "x", "--case", "h200/1b-torchao-rowwise")[2]
    )


def test_what_was_stored_before_the_disk_was_full_is_told(run, project, monkeypatch):
    for case in (CASE, Case("1b", "torchao", "tensorwise")):
        write_baseline(project / "out/candidates", baseline(case, memory=0.7, reason="", run="c" * 12))
    replaced = os.replace

    def full(source, target):
        if "tensorwise" in str(target):
            raise OSError(errno.ENOSPC, "No space left on device")
        replaced(source, target)

    monkeypatch.setattr("os.replace", full)
    code, out, err = run("promote", "out/candidates", "--reason", "x")
    assert code == 1
    assert "wrote baselines/h200/1b-torchao-rowwise.json" in out
    assert "candidate h200/1b-torchao-tensorwise was not stored: FP8-B09: could not write" in err


@pytest.mark.parametrize(
    ("first", "asked", "code"),
    [({}, ("--case", "1b-torchao-tensorwise"), 0), ({"unfit": "FP8 was not shown to run"}, (), 1)],
)
def test_candidates_behind_one_left_out_are_stored(run, project, first, asked, code):
    other = Case("1b", "torchao", "tensorwise")
    before = (project / "baselines/h200/1b-torchao-rowwise.json").read_bytes()
    for case, origin in ((CASE, first), (other, {})):
        write_baseline(project / "out/candidates", baseline(case, memory=0.7, reason="", run="c" * 12, **origin))
    assert run("promote", "out/candidates", "--reason", "x", *asked)[0] == code
    assert (project / "baselines/h200/1b-torchao-rowwise.json").read_bytes() == before
    assert read_baseline(project / "baselines", "h200", other.id, other.digest()).values("memory_ratio") == [0.7]


def test_a_broken_candidate_of_another_case_is_in_nobodys_way(run, project):
    write_baseline(project / "out/candidates", baseline(memory=0.7, reason="", run="c" * 12))
    (project / "out/candidates/h200/1b-torchao-tensorwise.json").write_text("{")
    assert run("promote", "out/candidates", "--reason", "x")[0] == 2
    code, _, err = run("promote", "out/candidates", "--reason", "x", "--case", "h200/1b-torchao-tensorwise")
    assert code == 2
    assert "1b-torchao-tensorwise.json" in err
    assert run("promote", "out/candidates", "--reason", "x", "--case", "1b-torchao-rowwise")[0] == 0
    stored = read_baseline(project / "baselines", "h200", CASE.id, CASE.digest())
    assert stored.values("memory_ratio") == [0.7]


def test_a_promotion_of_one_gpu_leaves_the_others(run, project):
    for gpu in ("h100", "h200"):
        write_baseline(project / "out/candidates", replace(baseline(memory=0.7, run="c" * 12), gpu=gpu))
    assert run("promote", "out/candidates", "--reason", "x", "--gpu", "h100")[0] == 0
    kept = [read_baseline(project / "baselines", gpu, CASE.id, CASE.digest()) for gpu in ("h100", "h200")]
    assert [each.values("memory_ratio") for each in kept] == [[0.7], [0.85]]
