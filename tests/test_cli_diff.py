"""``pytest-fp8 baselines diff``: what it calls worse, and which sides it refuses to compare."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import replace

import pytest

from helpers.baselines import edit
from helpers.project import SUITE, baseline, commands_in, faster, later, project_in
from pytest_fp8 import Case
from pytest_fp8.baselines.store import write_baseline


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return project_in(tmp_path)


@pytest.fixture
def run(project, capsys):
    return commands_in(capsys)


@pytest.mark.parametrize(
    ("change", "code", "says"),
    [
        ({}, 0, "0 changed, 1 as they were"),
        ({"speed": faster(0.003)}, 0, "0 changed"),
        ({"speed": faster(-0.06)}, 1, "worse: h200/1b-torchao-rowwise"),
        ({"speed": faster(-0.019)}, 0, "moved"),
        ({"speed": faster(0.06)}, 0, "better"),
        ({"memory": 0.86}, 0, "0 changed"),
        ({"memory": 0.95}, 1, "0.850x   0.950x   +11.76% (band 2%)"),
    ],
)
def test_diff_tells_worse_from_better_from_noise(run, project, change, code, says):
    write_baseline(project / "new", later(**change))
    seen, out, _ = run("diff", "baselines", "new")
    assert says in out
    assert seen == code


def test_diff_shows_the_interval_of_a_speedup_and_what_else_differs(run, project):
    write_baseline(project / "new", later(speed=faster(-0.06), libraries={"torch": "2.0.0"}))
    _, out, _ = run("diff", "baselines", "new")
    line = next(line for line in out.splitlines() if " speedup " in line)
    assert "1.106x      1.042x      -5.82% [-7." in line
    assert "measured with torch 1.0.0 -> 2.0.0" in out


def test_diff_of_two_files_and_as_json(run, project):
    other = write_baseline(project / "new", later(speed=faster(-0.06)))
    code, out, _ = run("diff", "--json", "baselines/h200/1b-torchao-rowwise.json", str(other))
    assert code == 1
    [revision] = json.loads(out)["baselines"]
    assert {c["metric"]: c["word"] for c in revision["changes"]} == {
        "bf16_ms": "same",
        "fp8_layers": "same",
        "fp8_ms": "noise",
        "fp8_share": "same",
        "loss_gap": "same",
        "loss_twin_gap": "same",
        "memory_ratio": "same",
        "speedup": "worse",
    }


def test_a_redefined_case_is_not_compared(run, project):
    write_baseline(project / "new", replace(baseline(speed=faster(-0.5)), case_hash="other"))
    code, out, _ = run("diff", "baselines", "new")
    assert code == 0
    assert "is new (the case was redefined: its old numbers are not compared)" in out


def test_diff_against_a_git_revision(run, project):
    git = ["git", "-C", str(project), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    for arguments in (["init", "-q", "-b", "main"], ["add", "."], ["commit", "-qm", "all"]):
        subprocess.run([*git, *arguments], check=True)
    assert run("diff", "--git", "main")[0] == 0
    path = write_baseline(project / "baselines", later(memory=1.2))
    code, out, _ = run("diff", "--git", "main")
    assert code == 1
    assert "memory_ratio" in out
    path.unlink()
    write_baseline(project / "baselines", baseline(Case("8b", "torchao", "rowwise")))
    code, out, _ = run("diff", "--git", "main")
    assert code == 1
    assert "1 removed: h200/1b-torchao-rowwise" in out
    assert "worse: h200/1b-torchao-rowwise" in out


def test_a_folder_that_is_gone_since_a_git_revision_has_lost_all(run, project):
    git = ["git", "-C", str(project), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    for arguments in (["init", "-q", "-b", "main"], ["add", "."], ["commit", "-qm", "all"]):
        subprocess.run([*git, *arguments], check=True)
    moved = project / "elsewhere"
    (project / "baselines").rename(moved)
    code, out, _ = run("diff", "--git", "main")
    assert code == 1
    assert "1 removed: h200/1b-torchao-rowwise" in out
    code, out, _ = run("diff", "--git", "main", "elsewhere")
    assert code == 0
    assert "removed" not in out
    # git removes the folders that it leaves empty.
    deep = project / "ci/baselines"
    deep.parent.mkdir()
    moved.rename(deep)
    for arguments in (["add", "."], ["commit", "-qam", "deep"], ["rm", "-rq", "ci"]):
        subprocess.run([*git, *arguments], check=True)
    assert not deep.parent.exists()
    code, out, _ = run("diff", "--git", "main", "--dir", str(deep))
    assert code == 1
    assert "1 removed: h200/1b-torchao-rowwise" in out


def forged(path, **changes):
    """A stored session's figures changed, with a digest that fits."""
    edit(path, lambda data: data["sessions"][0]["metrics"].update(changes))


@pytest.mark.parametrize(
    ("forge", "code", "says"),
    [
        (lambda path: edit(path, lambda data: data["sessions"].pop(0)), 2, "has 0 values, not 1 to 8"),
        (lambda path: forged(path, memory_ratio=[0.86]), 1, "not the stored ones"),
        (lambda path: edit(path, lambda data: data["sessions"][0].update(date="2026-11-19")), 1, "not the stored ones"),
        (lambda path: edit(path, lambda data: data["sessions"][0]["metrics"].pop("loss_gap")), 1, "not the stored"),
        (lambda path: edit(path, lambda data: data["sessions"][0].update(tolerance=0.99)), 2, "has no field"),
        (lambda path: edit(path, lambda data: data.update(sessions=[]), sign=False), 2, "0 values"),
        (lambda path: edit(path, lambda data: data["sessions"][0].update(reason="x"), sign=False), 2, "by hand"),
        (lambda path: path.write_text(path.read_text().replace("0.85", "NaN")), 2, "NaN is no number"),
        (lambda path: path.rename(path.with_name("1b-te-block.json")), 2, "holds the baseline of"),
        (lambda path: path.rename(path.with_name("_hidden.json")), 1, "1 removed"),
    ],
)
def test_no_trick_on_a_stored_file_reads_as_it_was(run, project, forge, code, says):
    shutil.copytree(project / "baselines", project / "new")
    forge(project / "new/h200/1b-torchao-rowwise.json")
    seen, out, err = run("diff", "baselines", "new")
    assert says in out + err
    assert seen == code


def test_the_tolerance_of_a_speedup_is_the_case_s_own_and_never_the_file_s(run, project):
    write_baseline(project / "new", later(speed=faster(-0.03)))
    assert run("diff", "baselines", "new")[0] == 1
    wide = SUITE.replace('"rowwise")', '"rowwise", tolerance=0.08)')
    (project / "wide.py").write_text(wide)
    assert run("diff", "baselines", "new", "--suite", "wide.py")[0] == 0


@pytest.mark.parametrize("revision", ["no-such-branch", "--output=x", "HEAD"])
def test_a_revision_that_is_none_is_refused(run, project, revision):
    code, _, err = run("diff", f"--git={revision}")
    assert code == 2
    assert "cannot be read" in err
    assert not (project / "x").exists()


@pytest.mark.parametrize("arguments", [("baselines",), ("baselines", "nowhere"), ()])
def test_diff_of_one_side_or_of_nothing_is_refused(run, arguments):
    assert run("diff", *arguments)[0] == 2


def test_a_corrupt_side_is_no_answer(run, project):
    (project / "baselines/h200/1b-torchao-rowwise.json").write_text("<<<<<<< HEAD\n")
    code, _, err = run("diff", "baselines", "baselines")
    assert code == 2
    assert "merged with conflict markers" in err
