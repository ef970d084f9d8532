"""``pytest-fp8 baselines``: what it lists, finds and calls worse, and its exit codes."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace

import pytest

from helpers.baselines import baseline as stored
from pytest_fp8 import Case
from pytest_fp8.baselines.store import write_baseline
from pytest_fp8.cli import main
from pytest_fp8.codes import B

FILE = "baselines/h200/1b-torchao-rowwise.json"


SUITE = """
from pytest_fp8 import Case
ALL = [Case("1b", "torchao", "rowwise"), Case("1b", "torchao", "tensorwise")]
EMULATED = (Case("tiny", "torchao", "rowwise", emulated=True),)
NULL = Case("1b", "bf16", "none", questions=("speedup",))
"""
CASE = Case("1b", "torchao", "rowwise")
QUIET = [[0.1, 0.101, 0.099, 0.1, 0.1, 0.1], [0.102, 0.101, 0.102, 0.103, 0.102, 0.102]]


def baseline(case=CASE, speed=QUIET, memory=0.85, **origin):
    metrics = {
        "speedup": speed,
        "bf16_ms": [120.0, 120.4],
        "fp8_share": [0.78],
        "fp8_layers": [28],
        "memory_ratio": [memory],
        "loss_gap": [0.005, -0.001, 0.01],
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
    """A project with a suite and one stored baseline."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "suites").mkdir()
    (tmp_path / "suites/matrix.py").write_text(SUITE)
    write_baseline(tmp_path / "baselines", baseline())
    return tmp_path


@pytest.fixture
def run(project, capsys):
    """Calls `pytest-fp8 baselines` with its arguments: the exit code, what it printed, and its errors."""

    def call(*arguments):
        code = main(["baselines", *arguments])
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


@pytest.fixture
def committed(project):
    git = ["git", "-C", str(project), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    for arguments in (["init", "-q", "-b", "main"], ["add", "."], ["commit", "-qm", "all"]):
        subprocess.run([*git, *arguments], check=True)


# -- list ---------------------------------------------------------------------------------------------------------


def test_list_has_one_line_per_baseline_and_its_origin_below(run, project):
    code, out, _ = run("list")
    assert code == 0
    line = next(line for line in out.splitlines() if "1b-torchao-rowwise" in line)
    assert line.split()[:2] == ["1b-torchao-rowwise", "h200"]
    assert "1.106x [1.1" in line
    assert {"78.00%", "0.850x", "+0.0047"} <= set(line.split())
    assert "from 1: 2026-11-20, commit 0123456789ab, torch 1.0.0: first" in out
    assert "\x1b" not in out, "plain where there is no terminal"
    (project / "baselines/h200/bad.json").write_text("{")
    code, out, err = run("list")
    assert (code, "1b-torchao-rowwise" in out) == (2, True)
    assert "bad.json is not a readable baseline" in err


@pytest.mark.parametrize(
    ("arguments", "next_step"),
    [
        (["list", "1b-torchao-rowise"], "did you mean '1b-torchao-rowwise'?"),
        (["list", "--gpu", "h20o"], "did you mean 'h200'?"),
        (["check", "--gpu", "h20o"], "did you mean 'h200'?"),
    ],
)
def test_an_unknown_name_is_refused(run, arguments, next_step):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert f"next:     {next_step}" in err


# -- check --------------------------------------------------------------------------------------------------------


def test_a_sound_folder_has_no_errors_and_its_gaps_are_notes(run):
    code, out, _ = run("check")
    assert code == 0
    assert "unexercised: the suite defines this case and no baseline is stored for it: 1b-torchao-tensorwise" in out
    assert "1b-bf16" not in out, "a control has no baseline"
    assert "1 baselines: 0 error(s), 1 note(s)" in out


@pytest.mark.parametrize(
    ("code", "broken"),
    [
        (B.UNREADABLE, lambda path: path.rename(path.with_name("1b-torchao-tensorwise.json"))),
        (B.ORPHANED, lambda path: write_baseline(path.parent.parent, baseline(Case("8b", "torchao", "rowwise")))),
        (B.REDEFINED, lambda path: write_baseline(path.parent.parent, replace(baseline(), case_hash="0" * 16))),
    ],
)
def test_check_fails_on(run, project, code, broken):
    """`tests/words/test_words.py` has the other codes."""
    broken(project / FILE)
    exit_code, out, _ = run("check")
    assert (exit_code, code in out) == (1, True)


def test_the_speed_of_a_case_that_is_asked_for_none_is_not_too_coarse(run, project):
    untimed = 'Case("1b", "torchao", "rowwise", questions=("layers", "memory"))'
    write_baseline(project / "baselines", baseline(speed=[[0.0] * 6, [0.2] * 6]))
    (project / "suites/matrix.py").write_text(SUITE.replace('Case("1b", "torchao", "rowwise")', untimed))
    assert run("check")[0] == 0


def test_without_a_suite_each_file_is_looked_at_alone(run, project):
    (project / "suites/matrix.py").unlink()
    code, _, err = run("check")
    assert (code, "--suite" in err) == (2, True), "no clean bill"
    shutil.rmtree(project / "suites")
    own = write_baseline(project / "baselines", baseline(Case("own", "torchao", "rowwise", name="mine")))
    code, out, _ = run("check")
    assert code == 0
    assert "2 baselines, each looked at alone, for no " in out
    own.write_text("{")
    assert run("check")[0] == 1
    assert run("check", "--suite", "matrix.py")[0] == 2, "what is named must be there"
    shutil.rmtree(project / "baselines")
    assert run("check")[0] == 2, "nothing was looked at"


# -- diff ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("committed")
@pytest.mark.parametrize(
    ("change", "code", "says"),
    [
        ({}, 0, "0 changed, 1 as they were"),
        ({"speed": faster(-0.06), "libraries": {"torch": "2.0.0"}}, 1, "torch 1.0.0 -> 2.0.0"),
        ({"speed": faster(-0.06)}, 1, "1.106x -> 1.042x -5.82% [-7."),
        ({"speed": faster(-0.019)}, 0, "moved"),
        ({"memory": 0.95}, 1, "0.850x -> 0.950x +11.76% (band 2%)"),
    ],
)
def test_diff_tells_worse_from_better_from_noise(run, project, change, code, says):
    write_baseline(project / "baselines", later(**change))
    seen, out, _ = run("diff")
    assert says in " ".join(out.split())
    assert seen == code


@pytest.mark.usefixtures("committed")
def test_the_tolerance_of_a_speedup_is_the_case_s_own_and_never_the_file_s(run, project):
    write_baseline(project / "baselines", later(speed=faster(-0.03)))
    assert run("diff")[0] == 1
    (project / "wide.py").write_text(SUITE.replace('"rowwise")', '"rowwise", tolerance=0.08)'))
    assert run("diff", "--suite", "wide.py")[0] == 0


@pytest.mark.usefixtures("committed")
def test_diff_finds_what_was_removed_and_compares_nothing_with_a_redefined_case(run, project):
    path = write_baseline(project / "baselines", replace(baseline(speed=faster(-0.5)), case_hash="other"))
    code, out, _ = run("diff", "--git", "main")
    assert code == 0
    assert "is new (the case was redefined: its old numbers are not compared)" in out
    path.unlink()
    write_baseline(project / "baselines", baseline(Case("8b", "torchao", "rowwise")))
    code, out, _ = run("diff", "--git", "main")
    assert code == 1
    assert "worse: h200/1b-torchao-rowwise" in out
    shutil.rmtree(project / "baselines")
    code, out, _ = run("diff", "--git", "main")
    assert (code, "1 removed: h200/1b-torchao-rowwise" in out) == (1, True), "a folder that is gone has lost all"
    code, _, err = run("diff", "--git=no-such-branch")
    assert (code, "cannot be read" in err) == (2, True)
