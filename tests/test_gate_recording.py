"""Recording blocks on a GPU that is not there: what is written, when, and under which name."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from helpers.fakes import H200, SUITE, FakeProcess, install

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.gate.record import cases, free_name, from_report, record
from benchmarks.gate.record import main as record_main
from benchmarks.gate.recordings import from_recording
from pytest_fp8 import Case


def test_a_recording_is_whole_after_every_process(tmp_path, monkeypatch):
    world = install(monkeypatch, H200)
    from pytest_fp8.arms.pool import ArmPool

    name = "1b-torchao-tensorwise"
    pool = ArmPool(H200)
    writes = []
    monkeypatch.setattr("pytest_fp8.baselines.atomic.write_atomically", lambda p, text: writes.append(json.loads(text)))
    record(name, pool, processes=3, blocks=5, out=tmp_path, reason="test")
    pool.close()
    assert [len(content["processes"]) for content in writes] == [1, 2, 3]
    last = writes[-1]
    assert all(len(p[arm]) == 10 for p in last["processes"] for arm in ("bf16", "fp8"))
    assert (last["case"], last["order"], last["case_hash"]) == (name, "abba", cases()[name].digest())
    assert set(last["provenance"]) == {"date", "commit", "dirty", "gpu", "libraries", "reason", "run"}
    assert world.built.count(name) == 3, "each process is a fresh one"
    again = from_recording(last, "x")
    assert len(again.quads) == 3
    assert again.quads[0].shape == (5, 4)


def test_an_interrupt_keeps_the_whole_processes(tmp_path, monkeypatch):
    install(monkeypatch, H200)
    real, asked = FakeProcess.blocks, []

    def blocks(self, count, steps, dropped):
        asked.append(self.pid)
        if len(set(asked)) == 5:
            raise KeyboardInterrupt
        return real(self, count, steps, dropped)

    monkeypatch.setattr(FakeProcess, "blocks", blocks)
    options = ["--case", "1b-torchao-tensorwise", "--blocks", "4", "--processes", "9", "--out", str(tmp_path)]
    assert record_main(options) == 130
    [path] = tmp_path.iterdir()
    assert len(json.loads(path.read_text())["processes"]) == 2


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
        pytester.runpytest("--fp8-gpu=h200", "--fp8-report-dir=out", "-k", asked)
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
    assert record_main(["--from-report", str(report), "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "tiny-torchao-rowwise.2.json", "none is overwritten"


def test_blocks_of_a_run_beside_a_stranger_are_recorded_and_not_used(reported, tmp_path):
    [path] = from_report(reported(strangers=(4242, 4243)), tmp_path)
    written = json.loads(path.read_text())
    [process] = written["processes"]
    assert process["strangers"] == 2
    assert min(process["bf16"]) > max(process["fp8"])
    with pytest.raises(ValueError, match="no undisturbed process"):
        from_recording(written, "x")


def test_without_a_gpu_nothing_is_recorded(monkeypatch, capsys):
    install(monkeypatch, None)
    assert record_main(["--case", "1b-torchao-tensorwise"]) == 2
    assert "nothing can be recorded here" in capsys.readouterr().err
