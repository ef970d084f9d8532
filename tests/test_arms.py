"""Real arms in real processes, on a CPU: what they answer, and what of this process they have."""

from __future__ import annotations

import math
import os

import numpy as np
import pytest

from helpers.arms import call, fresh_process, live_arm, spec
from pytest_fp8.arms.process import ArmProcess

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def arm():
    with live_arm() as process:
        yield process


@pytest.fixture
def fresh(request):
    with fresh_process(request) as process:
        yield process


def test_the_same_seed_gives_the_same_curve_and_another_seed_another(arm):
    first = arm.request("curve", seed=1, steps=5)
    assert arm.request("curve", seed=1, steps=5) == first
    assert arm.request("curve", seed=2, steps=5)["losses"] != first["losses"]
    assert arm.request("curve", seed=1, steps=5, jitter=True)["losses"] != first["losses"]


def test_logits_travel_as_raw_numbers(arm):
    logits = arm.request("logits", seed=0)
    assert isinstance(logits, bytes)
    output = np.frombuffer(logits, dtype=np.float32, offset=4)  # after the fingerprint of what entered the model
    assert output.size
    assert np.isfinite(output).all()
    assert arm.request("logits", seed=0) == logits, "the next answer is read from its own beginning"


def not_a_number(model, batch):
    return model(batch).sum() * float("nan")


def infinite(model, batch):
    return model(batch).sum() * 0 + float("inf")


@pytest.mark.parametrize(("loss", "is_so"), [(not_a_number, math.isnan), (infinite, math.isinf)])
def test_losses_that_are_not_finite_reach_pytest_as_they_are(fresh, loss, is_so):
    fresh.start_import()
    assert fresh.receive() >= 0, "it has its libraries"
    fresh.build(spec(loss=loss))
    assert is_so(fresh.request("curve", seed=0, steps=1)["losses"][0])


def test_an_arm_has_the_variables_the_import_path_and_the_folder_of_now(tmp_path, monkeypatch):
    monkeypatch.setenv("MINE", "new")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules/lies_here.py").write_text("VALUE = 7")
    monkeypatch.syspath_prepend(tmp_path / "modules")
    arm = ArmProcess(fork=True)
    try:
        arm.build(spec())
        seen = call(arm, lambda: (os.environ["MINE"], os.getcwd(), __import__("lies_here").VALUE))
    finally:
        arm.close()
    assert seen == ("new", str(tmp_path), 7)
