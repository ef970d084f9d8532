"""Weights that move past the optimizer that a step is given, and a step that copies the model: habits of users."""

from __future__ import annotations

import copy

import pytest
import torch

from helpers.arms import make_model, spec
from pytest_fp8 import Case
from pytest_fp8.floats import of_text
from pytest_fp8.worker.server import ArmServer
from pytest_fp8.worker.state.snapshot import unchanged

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
    with unchanged(server.engine):
        server.engine.step(server.engine.training_batch(0, 0))
    assert all(map(torch.equal, before, server.engine.model.parameters()))


def test_each_weight_has_the_hook_of_one_optimizer():
    server = serve(optimizer=InBackward)
    server.numerics(moved=True)
    for parameter in server.engine.model.parameters():
        assert list(parameter._post_accumulate_grad_hooks.values()) == [server.engine.optimizer.now]


def test_what_a_user_s_hook_makes_of_a_gradient_is_seen():
    def emptied(parameter):
        parameter.grad.zero_()

    def convert(model):
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        convert_to_float8_training(model, config=Float8LinearConfig(emulate=True))
        model[2].bias.register_post_accumulate_grad_hook(emptied)
        return model

    found = serve(convert=convert).numerics(moved=False)["gradients"]
    assert [name for name, text in found["sketches"].items() if not any(of_text(text))] == ["2.bias"]


@pytest.mark.parametrize("optimizer", [InBackward, second_beside])
def test_a_curve_is_the_same_however_many_ran_before_it(optimizer):
    step = {"step": both_step, "loss": None} if optimizer is second_beside else {}
    server = serve(optimizer=optimizer, **step)
    server.engine.calibration_passes = 2
    first = server.curve(seed=0, steps=4)["losses"]
    server.curve(seed=1, steps=4)
    server.numerics(moved=True)
    assert server.curve(seed=0, steps=4)["losses"] == first
    server.engine.calibration_passes = 0
    assert server.curve(seed=0, steps=4)["losses"] == first


def test_a_watched_step_leaves_nothing_behind():
    import gc

    def values():
        gc.collect()
        return sum(each.numel() for each in gc.get_objects() if type(each) is torch.Tensor)

    server = serve()
    server.numerics(moved=False)
    before = values()
    server.numerics(moved=False)
    assert values() - before < 1000, "operands, samples and weights are gone"


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
    server.curve(seed=0, steps=3)
    saved = {name: p.detach().clone() for name, p in server.engine.model.named_parameters()}
    server.save(str(tmp_path / "one"), "safetensors", optimizer=False)
    server.curve(seed=1, steps=3)
    assert not server.load(str(tmp_path / "one"), "safetensors", optimizer=False, seed=1)["refused"]
    for name, parameter in server.engine.model.named_parameters():
        assert torch.equal(parameter, saved[name]), name
