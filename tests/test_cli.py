"""``pytest-fp8 baselines``: what each command prints, its exit codes, and that it loads nothing heavy."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.baselines import ORIGIN
from pytest_fp8 import Case
from pytest_fp8.baselines.atomic import updating
from pytest_fp8.baselines.store import Baseline, read_baseline, write_baseline
from pytest_fp8.cli import main

ROOT = Path(__file__).parent.parent
SUITE = """
from pytest_fp8 import Case
ALL = [Case("1b", "torchao", "rowwise"), Case("1b", "torchao", "tensorwise")]
EMULATED = (Case("tiny", "torchao", "rowwise", emulated=True),)
NULL = Case("1b", "bf16", "none", questions=("speedup",))
"""
CASE = Case("1b", "torchao", "rowwise")
SPEED = {"unit": "log ratio, BF16 over FP8 step time", "direction": "higher", "tolerance": 0.03}
QUIET = [[0.1, 0.101, 0.099, 0.1, 0.1, 0.1], [0.102, 0.101, 0.102, 0.103, 0.102, 0.102]]


def baseline(case=CASE, speed=QUIET, memory=0.85, **origin):
    metrics = {
        "speedup": {**SPEED, "values": speed},
        "bf16_ms": {"unit": "ms per step", "direction": "lower", "tolerance": 0.08, "values": [120.0, 120.4]},
        "fp8_share": {"unit": "share of GEMM FLOPs", "direction": "higher", "tolerance": 0.0, "values": [0.78]},
        "memory_ratio": {"unit": "FP8 over BF16 peak", "direction": "lower", "tolerance": 0.02, "values": [memory]},
        "loss_gap": {"unit": "nats", "direction": "lower", "tolerance": 0.02, "values": [0.005, -0.001, 0.01]},
    }
    return Baseline(case.id, case.digest(), "h200", metrics, {**ORIGIN, **origin})


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
    for text in ("process 2: 1.107", "blocks 1.1052", "tolerance 0.03", "+0.0050, -0.0010, +0.0100", "driver 580.1"):
        assert text in out
    assert json.loads(run("show", "1b-torchao-rowwise", "--json")[1]) == baseline().to_json()


def test_show_of_an_unknown_case_names_the_known_ones(run):
    code, _, err = run("show", "8b-te-block")
    assert code == 2
    assert "expected: 1b-torchao-rowwise" in err


# -- diff ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "code", "says"),
    [
        ({}, 0, "0 changed, 1 as they were"),
        ({"speed": faster(0.003)}, 0, "0 changed"),
        ({"speed": faster(-0.06)}, 1, "worse: h200/1b-torchao-rowwise"),
        ({"speed": faster(-0.02)}, 0, "moved"),
        ({"speed": faster(0.06)}, 0, "better"),
        ({"memory": 0.86}, 0, "0 changed"),
        ({"memory": 0.95}, 1, "0.850x   0.950x   +11.76% (band 2%)"),
    ],
)
def test_diff_tells_worse_from_better_from_noise(run, project, change, code, says):
    write_baseline(project / "new", baseline(**change))
    seen, out, _ = run("diff", "baselines", "new")
    assert says in out
    assert seen == code


def test_diff_shows_the_interval_of_a_speedup_and_what_else_differs(run, project):
    write_baseline(project / "new", baseline(speed=faster(-0.06), libraries={"torch": "2.0.0"}))
    _, out, _ = run("diff", "baselines", "new")
    line = next(line for line in out.splitlines() if " speedup " in line)
    assert "1.106x   1.042x   -5.82% [-7." in line
    assert "measured with torch 1.0.0 -> 2.0.0" in out


def test_diff_of_two_files_and_as_json(run, project):
    other = write_baseline(project / "new", baseline(speed=faster(-0.06)))
    code, out, _ = run("diff", "--json", "baselines/h200/1b-torchao-rowwise.json", str(other))
    assert code == 1
    [revision] = json.loads(out)["baselines"]
    assert {c["metric"]: c["word"] for c in revision["changes"]} == {
        "bf16_ms": "same",
        "fp8_share": "same",
        "loss_gap": "same",
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
    write_baseline(project / "baselines", baseline(memory=1.2))
    code, out, _ = run("diff", "--git", "main")
    assert code == 1
    assert "memory_ratio" in out


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


def test_a_baseline_with_local_weights_is_no_orphan(run, project):
    write_baseline(project / "baselines", baseline(replace(CASE, weights="somewhere")))
    assert "orphaned" not in {kind for kind, _ in findings(run)[1]}


def test_a_suite_that_is_not_there_is_no_clean_bill(run, project):
    (project / "suites/matrix.py").unlink()
    code, _, err = run("check")
    assert code == 2
    assert "--suite" in err


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


def test_prune_waits_for_no_update_to_end(run, project):
    orphan = write_baseline(project / "baselines", baseline(Case("8b", "torchao", "rowwise")))
    with updating(project / "baselines"):
        code, _, err = run("prune", "--yes")
    assert code == 2
    assert "another run is updating" in err
    assert orphan.exists()


# -- promote ------------------------------------------------------------------------------------------------------


def test_a_reviewed_candidate_becomes_the_baseline_with_a_reason(run, project):
    write_baseline(project / "out/candidates", baseline(memory=0.7, reason=""))
    code, out, _ = run("promote", "out/candidates", "--reason", "copies freed")
    assert code == 0
    assert "0.850x -> 0.700x" in out
    stored = read_baseline(project / "baselines", "h200", CASE.id, CASE.digest())
    assert stored.values("memory_ratio") == [0.7]
    assert stored.provenance["reason"] == "copies freed"
    assert "speedup" in stored.provenance["kept"]


def test_an_unfit_candidate_is_refused(run, project):
    before = (project / "baselines/h200/1b-torchao-rowwise.json").read_bytes()
    write_baseline(project / "out/candidates", baseline(memory=0.7, unfit="FP8 was not shown to run"))
    code, _, err = run("promote", "out/candidates", "--reason", "please")
    assert code == 1
    assert "FP8 was not shown to run" in err
    assert (project / "baselines/h200/1b-torchao-rowwise.json").read_bytes() == before


def test_a_promotion_of_a_case_without_candidate_is_refused(run, project):
    write_baseline(project / "out/candidates", baseline(memory=0.7))
    code, _, err = run("promote", "out/candidates", "--reason", "x", "--case", "8b-te-block")
    assert code == 2
    assert "no candidate of case '8b-te-block'" in err


# -- the real thing -----------------------------------------------------------------------------------------------


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
