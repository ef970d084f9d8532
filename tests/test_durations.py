"""Where the time of the arms went: by arm, operation and phase of the builds; and the share that answered questions."""

from __future__ import annotations

import json

import pytest

from helpers.fakes import H100, SUITE, FakeProcess, install
from pytest_fp8.report.durations import added, duration_lines, shares

ONE = {
    "elapsed": 100.0,
    "waited": {"8b-bf16": {"build": 30.0, "blocks": 20.0}, "8b-torchao-rowwise": {"build": 20.0, "layers": 20.0}},
    "builds": {"8b-bf16": [{"imports": 5.0, "first step": 8.0}, {"first step": 6.0}], "8b-torchao-rowwise": [{}]},
}


def test_shares_are_of_the_time_since_the_first_arm_was_started():
    assert shares(ONE) == (0.4, 0.5)
    assert shares({**ONE, "elapsed": 50.0}) == (40 / 90, 50 / 90), "arms that work side by side"


def test_each_arm_has_a_row():
    first, *rows = duration_lines(ONE)
    assert first == "arms: 100 s since the first was started: 40% answering questions, 50% being built, 10% neither"
    [bf16] = [row for row in rows if "8b-bf16" in row]
    assert " ".join(bf16.split()) == "8b-bf16 2 30.0 s first step 14.0 s, imports 5.0 s blocks 20.0 s"


def test_without_arms_nothing_is_said():
    assert duration_lines({}) == []
    assert duration_lines({"elapsed": 0.0, "waited": {}, "builds": {}}) == []


def test_workers_are_added():
    both = added(added({}, ONE), ONE)
    assert shares(both) == shares(ONE)
    assert len(both["builds"]["8b-bf16"]) == 4
    assert ONE["waited"]["8b-bf16"]["build"] == 30.0, "what a worker sent is left as it is"


@pytest.mark.oldest
def test_the_option_prints_them_and_the_report_has_them_always(pytester, monkeypatch):
    install(monkeypatch, H100)
    real = FakeProcess.receive

    def receive(self, timeout=0):
        answer = real(self, timeout)
        return {**answer, "seconds": {"first step": 2.0}} if isinstance(answer, dict) and "cudnn" in answer else answer

    monkeypatch.setattr(FakeProcess, "receive", receive)
    pytester.makepyfile(SUITE)
    without = pytester.runpytest("--fp8-gpu=h100", "--fp8-undecided=warn", "--fp8-report-dir=out")
    assert "answering questions" not in without.stdout.str()
    told = json.loads((pytester.path / "out/report.json").read_text())["durations"]
    assert told["builds"]["tiny-torchao-rowwise"] == [{"first step": 2.0}]
    assert {"build", "blocks", "layers"} <= set(told["waited"]["tiny-bf16"])
    with_it = pytester.runpytest("--fp8-gpu=h100", "--fp8-undecided=warn", "--fp8-durations")
    with_it.stdout.fnmatch_lines(["arms: * s since the first was started: *", "*tiny-bf16 *1 *first step 2.0 s*"])


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
    pytester.runpytest("--fp8-gpu=h100", "--fp8-undecided=warn", "--fp8-report-dir=out")
    told = json.loads((pytester.path / "so far").read_text())
    assert "build" in told["durations"]["waited"]["tiny-bf16"]
    assert len(told["entries"]) < len(json.loads((pytester.path / "out/report.json").read_text())["entries"])
