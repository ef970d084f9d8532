"""An update on a host that its GPU waits for: the note, and busy time that is stored and gated on."""

from __future__ import annotations

import json

import pytest

from helpers.fakes import H200, SUITE, install
from helpers.sessions import update
from helpers.waiting import Quiet, Scattering
from pytest_fp8.baselines.store import load_baseline


@pytest.fixture
def suite(pytester):
    pytester.makepyfile(SUITE)
    return pytester


def test_a_speedup_that_the_host_limits_is_stored_with_a_note(suite, monkeypatch):
    install(monkeypatch, H200, busy=30.0)
    first = suite.runpytest(*update())
    assert first.ret == 0
    first.stdout.fnmatch_lines(
        [
            "*baseline of tiny-torchao-rowwise is this host's as much as the GPU's in step time: *works 30.0 ms*",
            "  next: store one with a larger batch; on a slower host this one's gate may fail",
        ]
    )
    install(monkeypatch, H200, busy=30.0, speedup=1.0)
    result = suite.runpytest("--fp8-gpu=h200", "-k", "test_speedup and rowwise")
    assert result.ret == 1, "not answered on a declared GPU, and nothing that FP8 is blamed for"
    result.assert_outcomes(deselected=9)
    result.stdout.fnmatch_lines(["*INVALID*the host held up steps, and the baseline has step times alone*"])


def test_busy_time_is_stored_and_gated_on_where_the_host_makes_step_times_scatter(suite, monkeypatch):
    # Step times alone would be refused: their processes spread too much.
    install(monkeypatch, H200, busy=95.0, kernels_alone=True, host=0.8)
    first = suite.runpytest(*update(), "-k", "(test_speedup or test_layers) and rowwise")
    assert first.ret == 0
    first.stdout.fnmatch_lines(
        ["*baseline of tiny-torchao-rowwise is this host's as much as the GPU's*gated on busy time*"]
    )
    stored = load_baseline(suite.path / "baselines" / "h200" / "tiny-torchao-rowwise.json")
    assert len(stored.values("busy_speedup")) == len(stored.values("speedup")) == 4
    again = suite.runpytest("--fp8-gpu=h200", "-k", "test_speedup and rowwise")
    again.assert_outcomes(passed=1, deselected=9)
    # A host that holds nothing up changes nothing: the case is gated on busy time from then on.
    install(monkeypatch, H200, busy=95.0, kernels_alone=True)
    quiet = suite.runpytest("--fp8-gpu=h200", "-k", "test_speedup and rowwise", "--fp8-report=report")
    quiet.assert_outcomes(passed=1, deselected=9)
    report = json.loads((suite.path / "report" / "report.json").read_text())
    assert report["entries"]["tiny-torchao-rowwise"]["decisions"]["speedup"]["numbers"]["gated_on"] == "busy time"
    install(monkeypatch, H200, busy=95.0, kernels_alone=True, host=0.8, speedup=1.1)
    slower = suite.runpytest("--fp8-gpu=h200", "-k", "test_speedup and rowwise")
    slower.assert_outcomes(failed=1, deselected=9)
    slower.stdout.fnmatch_lines(["*FP8 lost speed against BF16 since the baseline*", "*of busy time*"])


def test_steps_that_scatter_while_no_arm_waits_are_said_to_and_busy_time_is_gated_on(suite, monkeypatch):
    install(monkeypatch, H200, busy=40.0)
    monkeypatch.setattr("pytest_fp8.arms.pool.ArmProcess", Scattering)
    first = suite.runpytest(*update(), "-k", "(test_speedup or test_layers) and rowwise")
    assert first.ret == 0
    first.stdout.fnmatch_lines(
        [
            "*tiny-torchao-rowwise is this host's as much as the GPU's in step time: FP8's blocks * ms a step, *; it "
            "is gated on busy time"
        ]
    )
    install(monkeypatch, H200, busy=40.0)
    monkeypatch.setattr("pytest_fp8.arms.pool.ArmProcess", Quiet)
    again = suite.runpytest(*update("faster"), "-k", "(test_speedup or test_layers) and rowwise")
    again.stdout.fnmatch_lines(["wrote baselines/h200/tiny-torchao-rowwise.json"])
    again.stdout.fnmatch_lines(["*so an earlier session says; it is gated on busy time"])
    stored = load_baseline(suite.path / "baselines" / "h200" / "tiny-torchao-rowwise.json")
    assert stored.gated == "busy_speedup"


def test_a_gpu_that_is_always_busy_has_no_such_note(suite, monkeypatch):
    install(monkeypatch, H200, busy=1e3)
    result = suite.runpytest(*update())
    assert result.ret == 0
    result.stdout.fnmatch_lines(["wrote baselines/h200/tiny-torchao-rowwise.json"])
    result.stdout.no_fnmatch_line("*launch-bound*")
