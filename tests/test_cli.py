"""``pytest-fp8 baselines``: what each command prints, its exit codes, and that it loads nothing heavy."""

from __future__ import annotations

import errno
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.baselines import baseline as stored
from helpers.baselines import edit
from pytest_fp8 import Case
from pytest_fp8.baselines.atomic import updating
from pytest_fp8.baselines.store import read_baseline, write_baseline
from pytest_fp8.cli import main

ROOT = Path(__file__).parent.parent
SUITE = """
from pytest_fp8 import Case
ALL = [Case("1b", "torchao", "rowwise"), Case("1b", "torchao", "tensorwise")]
EMULATED = (Case("tiny", "torchao", "rowwise", emulated=True),)
NULL = Case("1b", "bf16", "none", questions=("speedup",))
"""
CASE = Case("1b", "torchao", "rowwise")
TIMED = ("speedup", "bf16_ms", "fp8_ms")
QUIET = [[0.1, 0.101, 0.099, 0.1, 0.1, 0.1], [0.102, 0.101, 0.102, 0.103, 0.102, 0.102]]


def baseline(case=CASE, speed=QUIET, memory=0.85, **origin):
    metrics = {
        "speedup": speed,
        "bf16_ms": [120.0, 120.4],
        "fp8_share": [0.78],
        "fp8_layers": [28],
        "memory_ratio": [memory],
        "loss_gap": [0.005, -0.001, 0.01],
        "loss_twin_gap": [0.001, -0.001, 0.002],
    }
    return stored(case.id, case.digest(), metrics=metrics, **origin)


def later(day=21, **change):
    """The project's baseline with a session behind its first."""
    first = baseline()
    return replace(
        first, sessions=(*first.sessions, *baseline(date=f"2026-11-{day}", run=f"{day:012}", **change).sessions)
    )


def faster(by):
    return [[x + by for x in blocks] for blocks in QUIET]


@pytest.fixture
def project(tmp_path, monkeypatch):
    (tmp_path / "suites").mkdir()
    (tmp_path / "suites/matrix.py").write_text(SUITE)
    write_baseline(tmp_path / "baselines", baseline())
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(project, capsys):
    def call(*arguments):
        code = main(["baselines", *arguments])
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


# -- list and show ------------------------------------------------------------------------------------------------


def test_list_has_one_line_per_baseline_and_its_origin_below(run):
    code, out, _ = run("list")
    assert code == 0
    line = next(line for line in out.splitlines() if "1b-torchao-rowwise" in line)
    assert line.split()[:2] == ["1b-torchao-rowwise", "h200"]
    assert "1.106x [1.1" in line
    assert {"78.00%", "0.850x", "+0.0047"} <= set(line.split())
    assert "from 1: 2026-11-20, commit 0123456789ab, torch 1.0.0: first" in out
    assert "\x1b" not in out, "plain where there is no terminal"


def test_list_as_json(run):
    [facts] = json.loads(run("list", "--json")[1])
    assert facts["processes"] == 2
    assert facts["speedup"] == pytest.approx(1.1063, abs=1e-4)
    low, high = facts["speedup_interval"]
    assert low < facts["speedup"] < high


def test_list_of_another_gpu_is_empty(run):
    code, out, _ = run("list", "--gpu", "h100")
    assert code == 0
    assert "rowwise" not in out
    assert "rowwise" in run("list", "--gpu", "h200")[1]


def test_a_corrupt_file_is_named_and_the_others_are_listed(run, project):
    (project / "baselines/h200/bad.json").write_text("{")
    code, out, err = run("list")
    assert code == 2
    assert "1b-torchao-rowwise" in out
    assert "bad.json is not a readable baseline" in err


def test_show_has_every_value_and_where_it_came_from(run):
    code, out, _ = run("show", "1b-torchao-rowwise")
    assert code == 0
    for text in ("process 2: 1.107", "blocks 1.1052", "tolerance 0.02", "+0.0050, -0.0010, +0.0100", "driver 580.1"):
        assert text in out
    assert "1. 2026-11-20, commit 0123456789ab: speedup 1.106x (2 processes), memory_ratio 0.850x" in out
    assert "    ms per step; for information" in out, "it is never better or worse"
    assert json.loads(run("show", "1b-torchao-rowwise", "--json")[1]) == baseline().to_json()
    assert run("show", "h200/1b-torchao-rowwise") == (0, out, ""), "as update, promote and the closing summary call it"


@pytest.mark.parametrize(
    ("arguments", "says", "next_step"),
    [
        (["8b-te-block"], "expected: 1b-torchao-rowwise", "pytest-fp8 baselines list"),
        (["1b-torchao-rowise"], "no baseline of case '1b-torchao-rowise'", "did you mean '1b-torchao-rowwise'?"),
        (["h200/1b-torchao-rowise"], "for h200", "did you mean 'h200/1b-torchao-rowwise'?"),
        (["h100/1b-torchao-rowwise"], "for h100", "did you mean h200/1b-torchao-rowwise?"),
        (["../1b-torchao-rowwise"], "for ..", "did you mean h200/1b-torchao-rowwise?"),
        (["/1b-torchao-rowwise"], "no baseline of case", "did you mean h200/1b-torchao-rowwise?"),
        (["1b-torchao-rowwise", "--gpu", "h100"], "for h100", "did you mean h200/1b-torchao-rowwise?"),
        (["h200/1b-torchao-rowwise", "--gpu", "h100"], "is not of --gpu h100", "h100/1b-torchao-rowwise"),
        (["1b-torchao-rowwise/"], "expected: h200/1b-torchao-rowwise", "did you mean 'h200/1b-torchao-rowwise'?"),
        (["h200/"], "expected: h200/1b-torchao-rowwise", "pytest-fp8 baselines list"),
    ],
)
def test_show_of_an_unknown_case_names_the_known_ones(run, arguments, says, next_step):
    code, out, err = run("show", *arguments)
    assert code == 2
    assert says in err
    assert f"next:     {next_step}" in err
    assert not out


def test_show_of_two_gpus_shows_what_can_be_read_and_json_asks_for_one(run, tmp_path):
    folder = tmp_path / "baselines"
    (folder / "h100").mkdir()
    (folder / "h100" / "1b-torchao-rowwise.json").write_text("no baseline")
    code, out, err = run("show", "1b-torchao-rowwise")
    assert (code, "1b-torchao-rowwise on h200" in out) == (2, True)
    assert "h100/1b-torchao-rowwise.json is not a readable baseline" in err
    code, out, err = run("show", "1b-torchao-rowwise", "--json")
    assert (code, out) == (2, "")
    assert "next:     --gpu h100" in err
    assert run("show", "h200/1b-torchao-rowwise", "--json")[0] == 0


# -- diff ---------------------------------------------------------------------------------------------------------


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


def test_a_run_s_candidates_are_of_a_part_of_the_cases(run, project):
    write_baseline(project / "out/candidates", baseline(Case("8b", "torchao", "rowwise")))
    code, out, _ = run("diff", "baselines", "out/candidates")
    assert code == 0
    assert "1 only in A: h200/1b-torchao-rowwise" in out


def forged(path, **changes):
    """A stored session's figures changed, with a digest that fits."""
    edit(path, lambda data: data["sessions"][0]["metrics"].update(changes))


@pytest.mark.parametrize(
    ("forge", "code", "says"),
    [
        (lambda path: edit(path, lambda data: data["sessions"].pop(0)), 2, "has 0 values, not 1 to 8"),
        (lambda path: forged(path, memory_ratio=[0.86]), 1, "commit 0123456789ab was edited: memory_ratio"),
        (lambda path: edit(path, lambda data: data["sessions"][0].update(date="2026-11-19")), 1, "removed or edited"),
        (lambda path: edit(path, lambda data: data["sessions"][0]["metrics"].pop("loss_gap")), 1, "edited: loss_gap"),
        (lambda path: edit(path, lambda data: data["sessions"][0].update(tolerance=0.99)), 2, "unknown fields"),
        (lambda path: edit(path, lambda data: data.update(sessions=[]), sign=False), 2, "0 values"),
        (lambda path: edit(path, lambda data: data["sessions"][0].update(reason="x"), sign=False), 2, "by hand"),
        (lambda path: path.write_text(path.read_text().replace("0.85", "NaN")), 2, "NaN is no number"),
        (lambda path: path.rename(path.with_name("1b-te-block.json")), 2, "lies in another place"),
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


def test_show_marks_new_levels_other_libraries_and_change_points(run, project):
    quiet = [faster(x) for x in (0.0, 0.001, -0.04, -0.041)]
    sessions = [baseline(speed=speed, date=f"2026-11-{10 + i}").newest for i, speed in enumerate(quiet)]
    sessions[3] = replace(sessions[3], libraries={"torch": "2.0.0"}, starts=("memory_ratio",), measurement=1)
    write_baseline(project / "baselines", replace(baseline(), sessions=tuple(sessions)))
    out = run("show", "1b-torchao-rowwise")[1].splitlines()
    third = next(i for i, line in enumerate(out) if line.startswith("    3. 2026-11-12"))
    assert out[third + 1].strip().startswith("change point: speedup -4.0")
    marks = "\n".join(out[third + 3 :])
    assert "taken another way: measurement 1" in marks
    assert "a new level of memory_ratio begins" in marks
    assert "since the session before: torch 1.0.0 -> 2.0.0" in marks
    assert sum("change point" in line for line in out) == 1


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


# -- check and prune ----------------------------------------------------------------------------------------------


def test_a_sound_folder_has_no_errors_and_its_gaps_are_notes(run):
    code, out, _ = run("check", "--max-age", "100000")
    assert code == 0
    assert "unexercised: the suite defines this case and no baseline is stored for it: 1b-torchao-tensorwise" in out
    assert "1b-bf16" not in out, "a control has no baseline"
    assert "1 baselines, 4 cases: 0 error(s)" in out


def findings(run, *more):
    code, out, _ = run("check", "--json", *more)
    return code, {(f["kind"], f["case"]) for f in json.loads(out)}


def test_check_names_what_is_old_or_measured_with_other_libraries(run):
    code, found = findings(run, "--max-age", "-1")
    assert code == 0
    assert {("stale", "1b-torchao-rowwise"), ("other library", "1b-torchao-rowwise")} <= found


@pytest.mark.parametrize(
    ("kind", "broken"),
    [
        ("unreadable", lambda path: path.write_text("{")),
        ("orphaned", lambda path: write_baseline(path.parent.parent, baseline(Case("8b", "torchao", "rowwise")))),
        ("misplaced", lambda path: path.rename(path.with_name("1b-torchao-tensorwise.json"))),
        ("redefined", lambda path: write_baseline(path.parent.parent, replace(baseline(), case_hash="0" * 16))),
        ("too coarse", lambda path: write_baseline(path.parent.parent, baseline(speed=[[0.0] * 6, [0.2] * 6]))),
        ("unfit", lambda path: write_baseline(path.parent.parent, baseline(unfit="the loss question failed"))),
    ],
)
def test_check_fails_on(run, project, kind, broken):
    broken(project / "baselines/h200/1b-torchao-rowwise.json")
    code, found = findings(run, "--max-age", "100000")
    assert code == 1
    assert kind in {name for name, _ in found}


@pytest.mark.parametrize("named", ["baselines/h200", "baselines/h200/1b-torchao-rowwise.json"])
def test_one_gpu_s_folder_and_one_file_are_looked_at_as_parts_of_the_folder(run, project, named):
    code, found = findings(run, "--dir", named)
    assert code == 0
    whole = findings(run)[1]
    assert found == (whole if named == "baselines/h200" else {one for one in whole if one[1] == "1b-torchao-rowwise"})
    (project / "baselines/h200/1b-torchao-tensorwise.json").write_text("{")
    assert ("unreadable", "1b-torchao-tensorwise") in findings(run, "--dir", "baselines/h200")[1]
    assert findings(run, "--dir", "baselines/h200/1b-torchao-tensorwise.json")[0] == 1


def test_components_are_written_beside_the_baselines_they_are_of_and_of_no_single_file(run, project):
    assert run("variance", "--dir", "baselines/h200")[0] == 0
    assert sorted(path.name for path in project.rglob("_*.json")) == ["_variance.json"]
    assert (project / "baselines/h200/_variance.json").is_file()
    code, _, said = run("variance", "--dir", "baselines/h200/1b-torchao-rowwise.json")
    assert code == 2
    assert "those of all cases of a GPU" in said


@pytest.mark.parametrize("given", [["--gpu="], ["--gpu", ""]])
def test_an_empty_gpu_is_not_all_of_them(run, capsys, given):
    with pytest.raises(SystemExit) as ended:
        run("check", *given)
    assert ended.value.code == 2
    assert "--gpu is given and empty" in capsys.readouterr().err


def test_the_speed_of_a_case_that_is_asked_for_none_is_not_too_coarse(run, project):
    matrix = project / "suites/matrix.py"
    untimed = 'Case("1b", "torchao", "rowwise", questions=("layers", "memory"))'
    assert 'Case("1b", "torchao", "rowwise")' in matrix.read_text()
    write_baseline(project / "baselines", baseline(speed=[[0.0] * 6, [0.2] * 6]))
    assert findings(run)[0] == 1
    matrix.write_text(matrix.read_text().replace('Case("1b", "torchao", "rowwise")', untimed))
    assert findings(run)[0] == 0


def test_a_baseline_with_local_weights_is_no_orphan(run, project):
    write_baseline(project / "baselines", baseline(replace(CASE, weights="somewhere")))
    assert "orphaned" not in {kind for kind, _ in findings(run)[1]}


def test_check_looks_through_the_cases_once_for_all_files(run, project, monkeypatch):
    from pytest_fp8.baselines import check

    asked, real = [], check.with_and_without_weights
    monkeypatch.setattr(check, "with_and_without_weights", lambda cases: asked.append(1) or real(cases))
    for batch in range(1, 30):
        write_baseline(project / "baselines", baseline(replace(CASE, batch=batch)))
    findings(run)
    assert len(asked) == 1


def test_check_notes_what_is_not_stored_and_what_was_measured_otherwise(run, project):
    old = replace(baseline(), sessions=(replace(baseline().newest, measurement=1),))
    path = write_baseline(project / "baselines", old)
    edit(path, lambda data: data["sessions"][0]["metrics"].pop("memory_ratio"))
    code, found = findings(run)
    assert code == 0
    assert {("incomplete", "1b-torchao-rowwise"), ("measured otherwise", "1b-torchao-rowwise")} <= found
    again = replace(baseline(), sessions=(*old.sessions, replace(baseline().newest, date="2026-11-22", run="c" * 12)))
    write_baseline(project / "baselines", again)
    assert not [kind for kind, _ in findings(run)[1] if kind == "measured otherwise"], "an update mended that"


def test_a_suite_that_is_not_there_is_no_clean_bill(run, project):
    (project / "suites/matrix.py").unlink()
    code, _, err = run("check")
    assert code == 2
    assert "--suite" in err


def test_without_a_suite_each_file_is_looked_at_alone(run, project):
    shutil.rmtree(project / "suites")
    own = write_baseline(project / "baselines", baseline(Case("own", "torchao", "rowwise", name="mine")))
    code, out, _ = run("check", "--max-age", "100000")
    assert code == 0
    assert "2 baselines, each looked at alone, for no " in out
    assert "suites/matrix.py lists cases (--suite): 0 error(s)" in out
    own.write_text("{")
    assert findings(run)[0] == 1
    assert run("check", "--suite", "matrix.py")[0] == run("prune")[0] == 2, "what is named must be there"
    shutil.rmtree(project / "baselines")
    assert run("check")[0] == 2, "nothing was looked at"


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


# -- promote ------------------------------------------------------------------------------------------------------


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
    assert "candidate h200/1b-torchao-tensorwise was not stored: could not write" in err


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


# -- the real thing -----------------------------------------------------------------------------------------------


def test_the_version_is_told(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("pytest-fp8 ")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_command_in_order(tmp_path, number):
    code = (
        "import os, signal, sys; from pytest_fp8 import cli; from pytest_fp8.arms.scratch import temporary_folder\n"
        "def run(options):\n"
        f"    with temporary_folder('x-') as made: print(made, flush=True); os.kill(os.getpid(), {int(number)})\n"
        "cli.add_doctor = lambda commands: commands.add_parser('doctor').set_defaults(run=run)\n"
        "sys.exit(cli.main(['doctor']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    by = "SIGTERM" if number is signal.SIGTERM else "Ctrl-C"
    assert done.stderr == f"pytest-fp8: ended by {by}, without an answer\n"
    assert not Path(done.stdout.strip()).exists()


def test_the_command_line_loads_neither_torch_nor_numpy():
    code = (
        "import sys; from pytest_fp8.cli import main; main(['baselines', 'list']); main(['baselines', 'prune']);"
        "main(['baselines', 'diff', 'baselines', 'baselines']);"
        "print([name for name in ('torch', 'numpy', 'pytest', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_baselines_of_this_repository_are_sound_but_for_their_precision(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    main(["baselines", "check", "--json"])
    errors = [f for f in json.loads(capsys.readouterr().out) if f["level"] == "error"]
    assert [f for f in errors if f["kind"] != "too coarse"] == []


@pytest.mark.parametrize("command", ["list", "check", "results", "prune", "diff baselines baselines"])
def test_a_gpu_that_nobody_knows_is_refused(run, command):
    code, _, said = run(*command.split(), "--gpu", "h20o")
    assert code == 2
    assert "--gpu h20o: nothing is stored of such a GPU" in said
    assert "next:" in said
    assert run(*command.split(), "--gpu", "h20")[0] == 0, "known, and nothing of it is stored"
