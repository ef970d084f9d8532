"""Recording blocks on a GPU that is not there: what is written, when, and under which name."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from helpers.fakes import H200, SUITE, install

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.gate.record import free_name, from_report
from benchmarks.gate.record import main as record_main
from benchmarks.gate.recordings import from_recording
from pytest_fp8 import Case


def test_a_second_recording_takes_another_name(tmp_path):
    assert free_name(tmp_path, "a").name == "a.json"
    (tmp_path / "a.json").touch()
    (tmp_path / "a.2.json").touch()
    assert free_name(tmp_path, "a").name == "a.3.json"


@pytest.fixture
def reported(pytester, monkeypatch):
    """Runs the suite as on a GPU, one of its two cases timed; gives the report."""

    def run(**world):
        install(monkeypatch, H200, **world)
        pytester.makepyfile(SUITE)
        asked = "test_layers or (test_faster and rowwise)"
        pytester.runpytest("--fp8-gpu=h200", "--fp8-report=out", "-k", asked)
        return pytester.path / "out/report.json"

    return run


def test_a_runs_report_gives_a_recording_of_each_timed_case(reported, tmp_path, capsys):
    report = reported(speedup=1.0)
    content = json.loads(report.read_text())
    assert set(content["entries"]) == {"tiny-torchao-rowwise", "tiny-te-current"}
    [path] = from_report(report, tmp_path)
    assert path == tmp_path / "tiny-torchao-rowwise.json", "the other case was not timed"
    written, timing = json.loads(path.read_text()), content["entries"]["tiny-torchao-rowwise"]["timing"]
    assert (written["schema"], written["case"], written["order"]) == (1, "tiny-torchao-rowwise", "abba")
    assert written["case_hash"] == Case("tiny", "torchao", "rowwise").digest()
    assert written["provenance"] == content["provenance"]
    assert [{arm: p[arm] for arm in ("bf16", "fp8")} for p in written["processes"]] == timing["processes"]
    assert len(timing["processes"]) > 1
    assert all(p["clocks_mhz"] == timing["clocks_mhz"] for p in written["processes"])
    assert [len(x) for x in from_recording(written, "x").quads] == [len(p["fp8"]) // 2 for p in timing["processes"]]
    assert record_main([str(report), "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "tiny-torchao-rowwise.2.json", "none is overwritten"


def test_blocks_of_a_run_beside_a_stranger_are_recorded_and_not_used(reported, tmp_path):
    [path] = from_report(reported(strangers=(4242, 4243)), tmp_path)
    written = json.loads(path.read_text())
    [process] = written["processes"]
    assert process["strangers"] == 2
    assert min(process["bf16"]) > max(process["fp8"])
    with pytest.raises(ValueError, match="no undisturbed process"):
        from_recording(written, "x")
