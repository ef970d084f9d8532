"""Checkpoints go through the model's and the optimizer's own ``load_state_dict()``, into weights that are others."""

from __future__ import annotations

import pytest

pytest.importorskip("torchao")

import torch

from helpers.carried import carried, loss, through
from helpers.loops import build, serve
from pytest_fp8 import Verdict

pytestmark = pytest.mark.slow


def loading(load):
    """A model with this ``load_state_dict``."""

    def made():
        class Net(torch.nn.Sequential):
            def load_state_dict(self, state_dict, *args, **kwargs):
                return load(super().load_state_dict, state_dict)

        return Net(torch.nn.Linear(32, 64), torch.nn.SiLU(), torch.nn.Linear(64, 32))

    return made


def refuse(load, state):
    raise RuntimeError("a custom key is missing")


@pytest.mark.parametrize("store", ["dcp", "safetensors"])
def test_a_model_that_refuses_the_checkpoint_fails_with_its_words(store):
    decision = carried(through(store), build=loading(refuse), loss=loss)
    assert decision.verdict is Verdict.FAIL, decision.message
    assert "RuntimeError: a custom key is missing" in decision.message
    assert f"fp8 -> bf16 through {store}" in decision.headline


def test_an_optimizer_that_refuses_the_checkpoint_fails_with_its_words():
    def optimizer(parameters):
        class Refusing(torch.optim.AdamW):
            def load_state_dict(self, state_dict):
                raise KeyError("amax")

        return Refusing(parameters, lr=1e-3)

    decision = carried(through("dcp"), build=build, loss=loss, optimizer=optimizer)
    assert decision.verdict is Verdict.FAIL, decision.message
    assert "KeyError: 'amax'" in decision.message


def test_a_weight_that_a_load_drops_is_missed_though_both_arms_hold_the_same():
    """Both arms start from one seed, and this optimizer moves nothing."""

    def drop(load, state):
        return load({key: value for key, value in state.items() if key != "2.bias"}, strict=False)

    decision = carried(
        through("safetensors"), build=loading(drop), loss=loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.0)
    )
    assert decision.verdict is Verdict.FAIL, decision.message
    assert "2.bias" in decision.message


class OldLoad(torch.nn.Sequential):
    """Written before torch's own method knew ``assign``."""

    def load_state_dict(self, state_dict, strict=True):
        return super().load_state_dict(state_dict, strict)


class InFp8(torch.optim.SGD):
    """Keeps its momentum in FP8."""

    @torch.no_grad()
    def step(self, closure=None):
        for weight in self.param_groups[0]["params"]:
            state = self.state[weight]
            old = state.get("momentum", torch.zeros_like(weight))
            state["momentum"] = (0.9 * old.float() + weight.grad.float()).to(torch.float8_e4m3fn)
            weight.add_(state["momentum"].to(weight.dtype), alpha=-1e-3)


class Turned(torch.nn.Module):
    """Random numbers of its own that no checkpoint holds."""

    def __init__(self):
        super().__init__()
        self.register_buffer("rates", torch.randn(64), persistent=False)
        self.one, self.two = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)

    def forward(self, x):
        return self.two((self.one(x) * self.rates).sin())


class Both(torch.optim.Optimizer):
    """Two optimizers, with a ``state_dict()`` of another form than torch's."""

    def __init__(self, parameters):
        weights = list(parameters)
        super().__init__(weights, {})
        self.parts = [torch.optim.AdamW(weights[:2], lr=1e-3), torch.optim.SGD(weights[2:], lr=1e-3, momentum=0.9)]

    def step(self, closure=None):
        for part in self.parts:
            part.step()

    def state_dict(self):
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict):
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)


@pytest.mark.parametrize(
    "parts",
    [
        {"build": lambda: OldLoad(torch.nn.Linear(32, 64), torch.nn.SiLU(), torch.nn.Linear(64, 32))},
        {"optimizer": lambda parameters: InFp8(parameters, lr=1e-3)},
        {"optimizer": Both},
        {"build": Turned},
    ],
    ids=["a load of one's own", "state in FP8", "a state_dict() of another form", "a buffer that is not saved"],
)
def test_sound_state_dicts_of_ones_own_pass(parts):
    """torch.distributed.checkpoint.state_dict refuses the first and the third."""
    decision = carried(through("safetensors", "dcp"), **{"build": build, "loss": loss, **parts})
    assert decision.verdict is Verdict.PASS, decision.message
    assert "left out" not in decision.headline


def test_state_in_another_dtype_is_cast_as_load_state_dict_does():
    def optimizer(parameters):
        class Wide(torch.optim.SGD):
            @torch.no_grad()
            def step(self, closure=None):
                for weight in self.param_groups[0]["params"]:
                    wide = self.state[weight].setdefault("wide", torch.zeros(weight.shape))
                    weight.add_(wide.add_(weight.grad / 3).to(weight.dtype), alpha=-1e-3)

        return Wide(parameters, lr=1e-3)

    decision = carried(through("dcp"), build=build, loss=loss, optimizer=optimizer)
    assert decision.verdict is Verdict.PASS, decision.message


def test_a_count_of_steps_stays_on_the_host_and_groups_come_back(tmp_path):
    one = serve(loss=loss, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3))
    one.curve(seed=1, steps=2)
    one.engine.optimizer.param_groups[0]["lr"] = 5e-4
    one.save(str(tmp_path), "dcp", optimizer=True)
    one.load(str(tmp_path), "dcp", optimizer=True, seed=2)
    optimizer = one.engine.optimizer
    assert optimizer.param_groups[0]["lr"] == 5e-4
    assert {state["step"].device.type for state in optimizer.state.values()} == {"cpu"}
