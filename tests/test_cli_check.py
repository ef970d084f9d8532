"""``pytest-fp8 baselines check``: what it finds in stored baselines, and in which of them it looks."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.baselines import edit
from helpers.project import CASE, baseline, commands_in, project_in
from pytest_fp8 import Case
from pytest_fp8.baselines.store import write_baseline
from pytest_fp8.cli import main

ROOT = Path(__file__).parent.parent


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return project_in(tmp_path)


@pytest.fixture
def run(project, capsys):
    return commands_in(capsys)


def test_a_sound_folder_has_no_errors_and_its_gaps_are_notes(run):
    code, out, _ = run("check", "--max-age", "100000")
    assert code == 0
    assert "unexercised: the suite defines this case and no baseline is stored for it: 1b-torchao-tensorwise" in out
    assert "1b-bf16" not in out, "a control has no baseline"
    assert "1 baselines: 0 error(s)" in out


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
    ],
)
def test_check_fails_on(run, project, kind, broken):
    broken(project / "baselines/h200/1b-torchao-rowwise.json")
    code, found = findings(run, "--max-age", "100000")
    assert code == 1
    assert kind in {name for name, _ in found}


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


def test_check_looks_through_the_cases_once_for_all_files(run, project, monkeypatch):
    from pytest_fp8.baselines import check

    asked, real = [], check.cases_for
    monkeypatch.setattr(check, "cases_for", lambda *given: asked.append(1) or real(*given))
    for batch in range(1, 30):
        write_baseline(project / "baselines", baseline(replace(CASE, batch=batch)))
    findings(run)
    assert len(asked) < 5


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
    assert run("check", "--suite", "matrix.py")[0] == 2, "what is named must be there"
    shutil.rmtree(project / "baselines")
    assert run("check")[0] == 2, "nothing was looked at"


def test_the_baselines_of_this_repository_are_sound_but_for_their_precision(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    main(["baselines", "check", "--json"])
    errors = [f for f in json.loads(capsys.readouterr().out) if f["level"] == "error"]
    assert [f for f in errors if f["kind"] != "too coarse"] == []
