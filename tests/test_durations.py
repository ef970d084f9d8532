"""Where the time of the arms went: by arm, operation and phase of the builds."""

from __future__ import annotations

import json

import pytest

from helpers.fakes import H100, SUITE, FakeProcess, install


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
