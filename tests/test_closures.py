"""Optimizers that run the step's forward and backward pass themselves (LBFGS, SAM), in live arms, on a CPU."""

from __future__ import annotations

import pytest

pytest.importorskip("torchao")

from helpers.closures import closing, lbfgs, sam
from helpers.loops import judge, serve
from pytest_fp8 import Verdict

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("keyword", [False, True])
@pytest.mark.parametrize("optimizer", [lbfgs, sam])
def test_each_call_of_a_closure_is_accounted_for(optimizer, keyword):
    decision = judge(serve(optimizer=optimizer, step=closing(keyword=keyword)))
    assert decision.verdict is Verdict.PASS, decision.message
    owed = {"fprop": 10, "dgrad": 8, "wgrad": 10}
    assert decision.numbers["roles"] == {role: {"expected": n, "fp8": n} for role, n in owed.items()}
    assert decision.numbers["fp8_share"] == 1.0


@pytest.mark.parametrize("optimizer", [lbfgs, sam])
def test_calibration_and_observation_change_no_weight(optimizer, monkeypatch):
    server = serve(optimizer=optimizer, step=closing())
    engine = server.engine
    server.curve(seed=0, steps=2)
    weights = {name: value.detach().clone() for name, value in engine.model.named_parameters()}
    entries = {name: sorted(state) for name, state in zip(weights, engine.optimizer.state.values(), strict=False)}
    engine.calibration_passes = 2
    engine.renew_scales()
    server.logits(seed=0)
    assert all(weights[name].equal(value) for name, value in engine.model.named_parameters())
    assert entries == {name: sorted(s) for name, s in zip(weights, engine.optimizer.state.values(), strict=False)}


def test_a_step_that_calls_its_closure_often_is_one_step_of_the_optimizer():
    """How often LBFGS calls it depends on the losses, and differs between the arms."""
    course = serve(optimizer=lbfgs, step=closing()).curve(seed=0, steps=3)["course"]
    assert course["stepped"] == [1, 1, 1]
