"""``pytest-fp8 baselines list``: what they print of stored baselines, and their exit codes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from helpers.project import baseline, commands_in, faster, project_in
from pytest_fp8.baselines.store import write_baseline


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return project_in(tmp_path)


@pytest.fixture
def run(project, capsys):
    return commands_in(capsys)


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
    code, out, _ = run("list", "1b-torchao-rowwise")
    assert code == 0
    for text in ("process 2: 1.107", "blocks 1.1052", "tolerance 0.02", "+0.0050, -0.0010, +0.0100", "driver 580.1"):
        assert text in out
    assert "1. 2026-11-20, commit 0123456789ab: speedup 1.106x (2 processes), memory_ratio 0.850x" in out
    assert "    ms per step; for information" in out, "it is never better or worse"
    assert json.loads(run("list", "1b-torchao-rowwise", "--json")[1]) == [baseline().to_json()]
    assert run("list", "h200/1b-torchao-rowwise") == (0, out, ""), "as the closing summary calls it"


@pytest.mark.parametrize(
    ("arguments", "says", "next_step"),
    [
        (["8b-te-block"], "expected: 1b-torchao-rowwise", "pytest-fp8 baselines list"),
        (["1b-torchao-rowise"], "no baseline of case '1b-torchao-rowise'", "did you mean '1b-torchao-rowwise'?"),
        (["h200/1b-torchao-rowise"], "no baseline of case", "did you mean 'h200/1b-torchao-rowwise'?"),
        (["h100/1b-torchao-rowwise"], "no baseline of case", "did you mean 'h200/1b-torchao-rowwise'?"),
    ],
)
def test_an_unknown_case_names_the_known_ones(run, arguments, says, next_step):
    code, out, err = run("list", *arguments)
    assert code == 2
    assert says in err
    assert f"next:     {next_step}" in err
    assert not out


def test_what_can_be_read_of_two_gpus_is_shown(run, tmp_path):
    folder = tmp_path / "baselines"
    (folder / "h100").mkdir()
    (folder / "h100" / "1b-torchao-rowwise.json").write_text("no baseline")
    code, out, err = run("list", "1b-torchao-rowwise")
    assert (code, "1b-torchao-rowwise on h200" in out) == (2, True)
    assert "h100/1b-torchao-rowwise.json is not a readable baseline" in err
    assert run("list", "h200/1b-torchao-rowwise", "--json")[0] == 0


def test_show_marks_new_levels_and_other_libraries(run, project):
    quiet = [faster(x) for x in (0.0, 0.001, -0.04, -0.041)]
    sessions = [baseline(speed=speed, date=f"2026-11-{10 + i}").newest for i, speed in enumerate(quiet)]
    sessions[3] = replace(sessions[3], libraries={"torch": "2.0.0"}, starts=("memory_ratio",), measurement=1)
    write_baseline(project / "baselines", replace(baseline(), sessions=tuple(sessions)))
    out = run("list", "1b-torchao-rowwise")[1].splitlines()
    fourth = next(i for i, line in enumerate(out) if line.startswith("    4. 2026-11-13"))
    marks = "\n".join(out[fourth + 1 :])
    assert "taken another way: measurement 1" in marks
    assert "a new level of memory_ratio begins" in marks
    assert "since the session before: torch 1.0.0 -> 2.0.0" in marks
