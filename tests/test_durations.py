"""Where the time of the arms went: by arm, operation and phase of the builds."""

from __future__ import annotations

import json

import pytest

from helpers.fakes import H100, SUITE, FakeProcess, install
from pytest_fp8.report.durations import added

ONE = {
    "elapsed": 100.0,
    "waited": {"8b-bf16": {"build": 30.0, "blocks": 20.0}, "8b-torchao-rowwise": {"build": 20.0, "layers": 20.0}},
    "builds": {"8b-bf16": [{"imports": 5.0, "first step": 8.0}, {"first step": 6.0}], "8b-torchao-rowwise": [{}]},
}


def test_workers_are_added():
    both = added(added({}, ONE), ONE)
    assert both["elapsed"] == 2 * ONE["elapsed"]
    assert len(both["builds"]["8b-bf16"]) == 4
    assert ONE["waited"]["8b-bf16"]["build"] == 30.0, "what a worker sent is left as it is"


@pytest.mark.oldest
def test_the_report_has_them(pytester, monkeypatch):
    install(monkeypatch, H100)
    real = FakeProcess.receive

    def receive(self, timeout=0):
        answer = real(self, timeout)
        return {**answer, "seconds": {"first step": 2.0}} if isinstance(answer, dict) and "cudnn" in answer else answer

    monkeypatch.setattr(FakeProcess, "receive", receive)
    pytester.makepyfile(SUITE)
    pytester.runpytest("--fp8-gpu=h100", "--fp8-report=out")
    told = json.loads((pytester.path / "out/report.json").read_text())["durations"]
    assert told["builds"]["tiny-torchao-rowwise"] == [{"first step": 2.0}]
    assert {"build", "blocks", "layers"} <= set(told["waited"]["tiny-bf16"])


SO_FAR = """
    import json
    from pathlib import Path

    import pytest

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(nodeid):
        seen = Path("so far")
        if not seen.exists():
            seen.write_text(Path("out/report.json").read_text())
"""


def test_the_report_has_them_after_the_first_test(pytester, monkeypatch):
    """A worker of pytest-xdist sends the same with each of its tests: a signal may leave it no later occasion."""
    install(monkeypatch, H100)
    pytester.makeconftest(SO_FAR)
    pytester.makepyfile(SUITE)
    pytester.runpytest("--fp8-gpu=h100", "--fp8-report=out")
    told = json.loads((pytester.path / "so far").read_text())
    assert "build" in told["durations"]["waited"]["tiny-bf16"]
    assert len(told["entries"]) < len(json.loads((pytester.path / "out/report.json").read_text())["entries"])
