"""A run's report as a file from a stranger: what reads it says one line, and writes nothing elsewhere."""

from __future__ import annotations

import json

import pytest

from benchmarks.gate.record import from_report
from helpers.fakes import H200, SUITE, install
from helpers.mutants import mutants
from pytest_fp8.cli import main
from pytest_fp8.codes import R

COUNT = 200


@pytest.fixture
def report(pytester, monkeypatch):
    install(monkeypatch, H200, busy=90.0)
    pytester.makepyfile(SUITE)
    pytester.runpytest("--fp8-gpu=h200", "-k", "test_speedup", "--fp8-report=out")
    return pytester.path / "out" / "report.json"


def test_a_report_that_is_not_there_is_named_before_what_a_page_needs(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("pytest_fp8.report.page.write.missing", lambda: ["matplotlib"])
    monkeypatch.chdir(tmp_path)
    assert main(["report", "nope"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"{R.NOT_A_REPORT}: 'nope' is no report")
    assert "matplotlib" not in said


@pytest.mark.nightly
def test_a_mutated_report_is_read_or_refused_in_one_line(report, tmp_path, capsys):
    text, out = report.read_text(), tmp_path / "recordings"
    out.mkdir()
    assert len(from_report(report, out)) == 2
    mutant, refused = tmp_path / "mutant.json", 0
    for _, data in mutants(text, COUNT, seed=1):
        mutant.write_bytes(data)
        code = code_of(lambda: from_report(mutant, out))
        said = capsys.readouterr().out
        if code == 2:
            refused += 1
            assert said.startswith(f"{mutant} is not a report that a run wrote: ")
            assert said.count("\n") == 2
    assert refused > COUNT / 8
    assert all(isinstance(json.loads(path.read_text())["provenance"], dict) for path in out.iterdir())


def code_of(read):
    try:
        read()
    except SystemExit as ended:
        return ended.code
    return 0


@pytest.mark.parametrize("name", ["../../x", "/tmp/x", ".hidden", "", "a/b", 241 * "y"])
def test_a_case_s_name_leaves_no_folder(report, tmp_path, name):
    data = json.loads(report.read_text())
    data["entries"] = {name: next(iter(data["entries"].values()))}
    report.write_text(json.dumps(data))
    with pytest.raises(SystemExit):
        from_report(report, tmp_path)
    assert not list(tmp_path.glob("**/x*"))
