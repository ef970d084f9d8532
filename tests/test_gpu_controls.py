"""The GPU half of the controls, on a GPU that is not there: each is caught where its arm does what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from control_runner import ControlRunner
from controls.catalogue import CATALOGUE
from controls.control import GPU
from helpers.controls import BY_ID, BrokenProcess, read_without_counts
from helpers.fakes import H200, install
from pytest_fp8.arms.pool import ArmPool
from pytest_fp8.options import Settings

ROOT = Path(__file__).parent.parent


@pytest.fixture
def pool():
    made = ArmPool(H200)
    yield made
    made.close()


@pytest.fixture
def runner(monkeypatch, pool):
    install(monkeypatch, H200, busy=113.0)
    monkeypatch.setattr("pytest_fp8.arms.pool.ArmProcess", BrokenProcess)
    monkeypatch.setattr("control_runner.read_baseline", read_without_counts)
    return ControlRunner(Settings(baseline_dir=ROOT / "baselines"), lambda: pool, "h200")


@pytest.mark.parametrize("control", [c for c in CATALOGUE if c.runs() == GPU], ids=lambda control: control.id)
def test_a_gpu_control_is_caught_where_its_arm_does_what_it_says(runner, control):
    outcome = runner.run(control)
    assert outcome.caught, outcome.message


def test_a_healthy_arm_is_called_none_of_these(runner):
    for control in CATALOGUE:
        if control.runs() == GPU and control.id != "both-slower":
            outcome = runner.run(type("Healthy", (control,), {"breaks": ()}))
            assert not outcome.caught, f"{control.id}: {outcome.message}"


@pytest.mark.usefixtures("runner")
def test_running_a_control_writes_no_baseline(pool, monkeypatch):
    written = []
    monkeypatch.setattr("pytest_fp8.baselines.store.write_atomically", lambda *file: written.append(file))
    made = ControlRunner(Settings(baseline_dir=ROOT / "baselines", reason="first"), lambda: pool, "h200")
    assert made.run(BY_ID["fp8-slower"]).caught, "held against the baseline, not stored as one"
    assert written == []
