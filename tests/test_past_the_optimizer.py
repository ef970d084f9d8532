"""Weights that move past the optimizer that a step is given, and a step that copies the model: habits of users."""

from __future__ import annotations

import copy

import pytest
import torch

from helpers.arms import make_model, spec
from pytest_fp8 import Case
from pytest_fp8.worker.server import ArmServer

pytestmark = pytest.mark.slow


def serve(case=None, **workload):
    return ArmServer(spec(*([case] if case else []), **workload))


def second_beside(parameters):
    parameters = list(parameters)
    main = torch.optim.Adam(parameters[2:], lr=1e-3)
    main.second = torch.optim.Adam(parameters[:2], lr=1e-2)
    return main


def both_step(model, batch, optimizer, precision):
    with precision():
        loss = (model(batch) - batch).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.second.step()
    model.zero_grad()
    return loss.detach()


class InBackward(torch.optim.Optimizer):
    """An optimizer for each weight, which steps as soon as its gradient is there."""

    def __init__(self, parameters):
        super().__init__(list(parameters), {})
        self.each = {}
        for parameter in self.param_groups[0]["params"]:
            self.each[parameter] = torch.optim.Adam([parameter], lr=1e-2)
            parameter.register_post_accumulate_grad_hook(self.now)

    def now(self, parameter):
        self.each[parameter].step()
        self.each[parameter].zero_grad()

    def step(self, closure=None): ...


@pytest.mark.parametrize("workload", [{"optimizer": second_beside, "step": both_step}, {"optimizer": InBackward}])
def test_a_pass_that_moves_no_weight_moves_none(workload):
    server = serve(**{**workload, **({"loss": None} if "step" in workload else {})})
    server.engine.restart(0)
    before = [p.detach().clone() for p in server.engine.model.parameters()]
    found = [server.numerics(moved=True) for _ in range(2)]
    assert set(found[0]["gradients"]["sketches"]) == {name for name, _ in server.engine.model.named_parameters()}
    assert found[0]["gradients"]["sketches"] == found[1]["gradients"]["sketches"]
    assert found[0]["moved"]["sketches"] == found[1]["moved"]["sketches"]
    server.engine.restart(0)
    with server.engine.standing_still():
        server.engine.step(server.engine.training_batch(0, 0))
    assert all(map(torch.equal, before, server.engine.model.parameters()))


def test_a_hook_of_the_users_stays_in_its_place():
    server = serve(optimizer=InBackward)
    parameter = next(server.engine.model.parameters())
    before = list(parameter._post_accumulate_grad_hooks.items())
    server.numerics(moved=False)
    after = list(parameter._post_accumulate_grad_hooks.items())
    assert [hook for _, hook in after[: len(before)]] == [hook for _, hook in before]


def copying(model, batch, optimizer, precision):
    with precision():
        loss = (model(batch) - batch).float().square().mean()
    twin = copy.deepcopy(model)
    with torch.no_grad(), precision():
        twin(batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def test_a_copy_that_a_step_makes_of_the_model_is_not_watched():
    plain, copied = serve(), serve(loss=None, step=copying)
    found, same = (
        [(p["layer"], p["role"], p["sqnr"]) for p in one.numerics(moved=False)["products"]] for one in (plain, copied)
    )
    assert found == same


class Averaging(torch.nn.Module):
    """A momentum encoder: the forward pass puts another tensor in each weight's place."""

    def __init__(self):
        super().__init__()
        self.online = make_model()
        self.slow = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for old, new in zip(self.slow.parameters(), self.online.parameters(), strict=True):
                old.data = 0.9 * old.data + 0.1 * new.data
            kept = self.slow(x)
        return self.online(x) + 0 * kept


@pytest.mark.parametrize("backend", ["bf16", "torchao"])
def test_what_a_checkpoint_holds_is_in_the_model_however_it_keeps_its_weights(backend, tmp_path):
    case = Case("own", "torchao", "tensorwise", emulated=True)
    server = serve(case if backend == "torchao" else case.reference(), build=Averaging)
    server.engine.curve(seed=0, steps=3)
    saved = {name: p.detach().clone() for name, p in server.engine.model.named_parameters()}
    server.save(str(tmp_path / "one"), "safetensors", optimizer=False)
    server.engine.curve(seed=1, steps=3)
    assert server.load(str(tmp_path / "one"), "safetensors", optimizer=False)["loaded"]
    for name, parameter in server.engine.model.named_parameters():
        assert torch.equal(parameter, saved[name]), name
