"""An optimizer that steps float32 master copies of the weights, which are none of the model's parameters."""

from __future__ import annotations

import pytest

pytest.importorskip("torchao")

import torch

from helpers.carried import carried, from_model, loss, through, with_model
from pytest_fp8 import Verdict
from pytest_fp8.codes import K, R
from pytest_fp8.worker.checkpoint.state import StrayParameter

pytestmark = pytest.mark.slow


class Masters(torch.optim.AdamW):
    """AdamW on float32 copies of the weights, as Apex and Megatron do it: its groups hold these copies alone."""

    def __init__(self, parameters, warm_up=0):
        self.live = list(parameters)
        super().__init__([weight.detach().float().clone() for weight in self.live], lr=1e-3)
        if warm_up:
            self.scheduler = torch.optim.lr_scheduler.LambdaLR(self, lambda step: max(0, step - warm_up))

    def zero_grad(self, set_to_none=True):
        super().zero_grad(set_to_none)
        for weight in self.live:
            weight.grad = None

    @torch.no_grad()
    def step(self, closure=None):
        masters = self.param_groups[0]["params"]
        for master, weight in zip(masters, self.live, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
        super().step()
        for master, weight in zip(masters, self.live, strict=True):
            weight.copy_(master)


def with_masters(model, optimizer, folder):
    torch.save([model.state_dict(), optimizer.state_dict(), optimizer.param_groups[0]["params"]], folder / "x.pt")


def from_masters(model, optimizer, folder):
    weights, state, masters = torch.load(folder / "x.pt", weights_only=True)
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    with torch.no_grad():
        for mine, stored in zip(optimizer.param_groups[0]["params"], masters, strict=True):
            mine.copy_(stored)


def test_master_copies_that_own_functions_carry_pass():
    decision = carried(
        through("safetensors", "dcp"), loss=loss, optimizer=Masters, save=with_masters, load=from_masters
    )
    assert decision.verdict is Verdict.PASS, decision.message
    assert "fp8 -> bf16 (dcp), fp8 -> bf16 (own, resumed)" in decision.headline, "through dcp the weights alone"
    assert "bf16 -> fp8 (dcp), bf16 -> fp8 (own, resumed)" in decision.headline
    assert "10 parameters of the optimizer are none of the model's" in decision.headline


def test_master_copies_that_a_load_forgets_fail():
    decision = carried(loss=loss, optimizer=Masters, save=with_model, load=from_model)
    assert decision.verdict is Verdict.FAIL
    assert decision.code is K.DOES_NOT_GO_ON


def test_without_own_functions_the_error_names_the_copies_and_the_functions():
    with pytest.raises(StrayParameter, match="10 parameters") as error:
        carried(through("dcp"), loss=loss, optimizer=Masters)
    assert error.value.fp8_code is R.STRAY_PARAMETER
    assert "master copies" in error.value.fp8_cause
    assert "Workload(save=..., load=...)" in error.value.fp8_next
