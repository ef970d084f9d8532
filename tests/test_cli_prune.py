"""``pytest-fp8 baselines prune``: which files it lists, and when it deletes them."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.project import SUITE, baseline, commands_in, project_in
from pytest_fp8 import Case
from pytest_fp8.baselines.atomic import updating
from pytest_fp8.baselines.store import write_baseline


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return project_in(tmp_path)


@pytest.fixture
def run(project, capsys):
    return commands_in(capsys)


@pytest.mark.parametrize("name", ["", "mine"])
def test_the_baseline_of_an_own_model_that_no_suite_lists_is_never_pruned(run, project, name):
    own = write_baseline(project / "baselines", baseline(Case("own", "torchao", "rowwise", name=name)))
    assert "no orphaned baselines" in run("prune", "--yes")[1]
    assert own.exists()
    code, out, _ = run("check", "--max-age", "100000")
    assert code == 0
    assert "own model: only its own test knows its definition" in out


def test_prune_lists_and_deletes_only_when_told(run, project):
    orphan = write_baseline(project / "baselines", baseline(Case("8b", "torchao", "rowwise")))
    code, out, _ = run("prune")
    assert code == 0
    assert "orphaned" in out
    assert str(orphan.relative_to(project)) in out
    assert orphan.exists()
    assert "deleted" in run("prune", "--yes")[1]
    assert not orphan.exists()
    assert (project / "baselines/h200/1b-torchao-rowwise.json").exists()
    assert "no orphaned baselines" in run("prune", "--yes")[1]


@pytest.mark.parametrize(
    ("named", "gpus"),
    [
        ((), ("h100", "h200")),
        (("--gpu", "h200"), ("h200",)),
        (("--dir", "my own/h200"), ("h200",)),
        (("--dir", "my own", "--gpu", "h100"), ("h100",)),
    ],
)
def test_what_prune_offers_deletes_what_it_lists_and_no_more(run, project, named, gpus):
    (project / "other.py").write_text(SUITE)
    if "--dir" in named:
        (project / "baselines").rename(project / "my own")
    folder = Path("my own" if "--dir" in named else "baselines")
    for gpu in ("h100", "h200"):
        write_baseline(folder, replace(baseline(Case("8b", "torchao", "rowwise")), gpu=gpu))
    listed = run("prune", *named, "--suite", "other.py")[1].splitlines()
    told = [line.removeprefix("orphaned ") for line in listed[:-1]]
    assert told == [str(folder / gpu / "8b-torchao-rowwise.json") for gpu in gpus]
    offered = shlex.split(listed[-1].removeprefix("next: ").removesuffix(" deletes them"))
    assert offered[:3] == ["pytest-fp8", "baselines", "prune"]
    assert run(*offered[2:])[1].splitlines() == [f"deleted {path}" for path in told]


def test_prune_waits_for_no_update_to_end(run, project):
    orphan = write_baseline(project / "baselines", baseline(Case("8b", "torchao", "rowwise")))
    with updating(project / "baselines"):
        code, _, err = run("prune", "--yes")
    assert code == 2
    assert "another run is updating" in err
    assert orphan.exists()
