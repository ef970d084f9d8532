"""Optimizers that run the step's forward and backward pass themselves (LBFGS, SAM), in live arms, on a CPU."""

from __future__ import annotations

import pytest

pytest.importorskip("torchao")

from test_loop import ALL, batch, judge, serve

from pytest_fp8 import Verdict


def lbfgs(parameters):
    import torch

    return torch.optim.LBFGS(parameters, lr=0.1, max_iter=2)


def sam(parameters):
    import torch

    class SAM(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            with torch.enable_grad():
                loss = closure()
            weights = [p for group in self.param_groups for p in group["params"]]
            before = [p.clone() for p in weights]
            for p in weights:
                p.add_(p.grad, alpha=0.05)
            with torch.enable_grad():
                closure()
            for p, old in zip(weights, before, strict=True):
                p.copy_(old)
            super().step()
            return loss

    return SAM(parameters, lr=0.1)


def closing(called=None, keyword=False):
    """A step whose optimizer is given a closure; ``called`` counts its calls."""

    def step(model, batch, optimizer, precision):
        def closure():
            if called is not None:
                called.append(1)
            optimizer.zero_grad()
            with precision():
                loss = (model(batch) - batch).float().pow(2).mean()
            loss.backward()
            return loss

        return (optimizer.step(closure=closure) if keyword else optimizer.step(closure)).detach()

    return step


@pytest.mark.parametrize("keyword", [False, True])
@pytest.mark.parametrize("optimizer", [lbfgs, sam])
def test_each_call_of_a_closure_is_accounted_for(optimizer, keyword):
    decision = judge(serve(optimizer=optimizer, step=closing(keyword=keyword)))
    assert decision.verdict is Verdict.PASS, decision.message
    owed = {"fprop": 10, "dgrad": 8, "wgrad": 10}
    assert decision.numbers["roles"] == {role: {"expected": n, "fp8": n} for role, n in owed.items()}
    assert decision.numbers["fp8_share"] == pytest.approx(ALL)


@pytest.mark.parametrize("optimizer", [lbfgs, sam])
def test_a_pass_that_must_move_no_weight_moves_none(optimizer, monkeypatch):
    server = serve(optimizer=optimizer, step=closing())
    engine = server.engine
    engine.curve(seed=0, steps=2)
    weights = {name: value.detach().clone() for name, value in engine.model.named_parameters()}
    entries = {name: sorted(state) for name, state in zip(weights, engine.optimizer.state.values(), strict=False)}
    monkeypatch.setattr(type(engine.backend), "calibration_passes", lambda *_: 2)
    engine.renew_scales()
    server.logits(seed=0)
    server._observed(batch(0))
    assert all(weights[name].equal(value) for name, value in engine.model.named_parameters())
    assert entries == {name: sorted(s) for name, s in zip(weights, engine.optimizer.state.values(), strict=False)}


def test_a_closure_s_gradients_are_there_when_their_norm_is_taken():
    norms = serve(optimizer=lbfgs, step=closing()).engine.curve(seed=0, steps=3)["gradient_norms"]
    assert all(norm > 0 for norm in norms)
