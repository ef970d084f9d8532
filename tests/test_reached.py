"""A layer's call whose output reaches no backward pass has no gradients to compute; all others have."""

from __future__ import annotations

import pytest

pytest.importorskip("torchao")

import torch

from helpers.loops import CASE, batch, judge, judge_both, serve
from pytest_fp8 import Verdict
from pytest_fp8.worker.record.recorder import StepRecorder
from pytest_fp8.worker.record.tables import layer_table

pytestmark = pytest.mark.slow


def pair():
    return torch.nn.ModuleDict({"a": torch.nn.Linear(8, 8), "b": torch.nn.Linear(8, 8)})


def watched(model, loss):
    """Name -> (dgrad, wgrad) owed by each call, in order. What is owed ran."""
    layers = {name: (8, 8) for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    recorder = StepRecorder(model, linears=layers)
    with recorder.watching():
        with recorder.in_phase("forward"):
            value = loss()
        with recorder.in_phase("backward"):
            value.backward()
    found = layer_table(recorder.table, layers)
    calls, others = found.calls, found.others
    assert not others
    # A recomputation ends as soon as it has what the backward pass needs.
    assert all({*call.owed} - {*call.ran} <= {"recompute"} for call in calls)
    return [(call.name, "dgrad" in call.owed, "wgrad" in call.owed) for call in calls]


def test_a_call_whose_output_is_detached_owes_no_gradients():
    model, x = pair(), torch.randn(4, 8)
    assert watched(model, lambda: model["b"](model["a"](x).detach()).sum()) == [("a", False, False), ("b", False, True)]


def test_of_two_calls_of_one_layer_only_the_one_that_is_reached_owes_gradients():
    model, x = pair(), torch.randn(4, 8)

    def loss():
        hidden = model["a"](x)
        return model["b"](hidden).sum() + model["b"](hidden.detach() + 1).detach().sum()

    assert watched(model, loss) == [("a", False, True), ("b", True, True), ("b", False, False)]


@pytest.mark.parametrize("shape", [(4, 8), (2, 2, 8)], ids=["matrix", "three dimensions"])
@pytest.mark.parametrize("change", ["whole", "a part"])
def test_an_output_that_is_changed_in_place_is_reached(shape, change):
    """Three dimensions with a bias: the output is a view, whose own node the backward pass goes past."""
    model, x = pair(), torch.randn(shape)

    def loss():
        hidden = model["a"](x)
        if change == "whole":
            hidden += 1
        else:
            hidden[..., :2] *= 2
        return model["b"](hidden).sum()

    assert watched(model, loss) == [("a", False, True), ("b", True, True)]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kept", [False, True], ids=["detached", "reached"])
def test_recomputed_calls_are_told_apart(reentrant, kept):
    from torch.utils.checkpoint import checkpoint

    model, x = pair(), torch.randn(4, 8, requires_grad=True)

    def loss():
        hidden = checkpoint(model["a"], x, use_reentrant=reentrant)
        return model["b"](hidden if kept else hidden.detach()).sum()

    seen = {name: gradients for name, *gradients in watched(model, loss)}
    assert seen["b"] == [kept, True]
    # A first pass without gradients that is never repeated is no call that trains.
    assert seen.get("a", [False, False]) == [kept, kept]


def test_an_output_that_is_no_tensor_is_followed():
    class Pair(torch.nn.Linear):
        def forward(self, x):
            return {"out": super().forward(x), "rows": len(x)}

    model, x = torch.nn.ModuleDict({"a": Pair(8, 8)}), torch.randn(4, 8)

    def loss():
        return model["a"](x)["out"].sum()

    assert watched(model, loss) == [("a", False, True)]


def adversaries():
    class Adversaries(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.generator = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))
            self.critic = torch.nn.Sequential(torch.nn.Linear(32, 48), torch.nn.GELU(), torch.nn.Linear(48, 16))

        def forward(self, x):
            return self.critic(self.generator(x))

    return Adversaries()


def two_halves(model, batch, optimizer, precision):
    with precision():
        made = model.generator(batch)
        critic = (model.critic(batch).mean() - model.critic(made.detach()).mean()).exp()
    critic.backward()
    optimizer.step()
    optimizer.zero_grad()
    model.critic.requires_grad_(False)
    with precision():
        loss = model(batch).mean().exp()
    loss.backward()
    model.critic.requires_grad_(True)
    optimizer.step()
    optimizer.zero_grad()
    return critic.detach() + loss.detach()


def test_a_step_whose_halves_train_one_part_each_passes():
    decision = judge(serve(build=adversaries, batch=batch, step=two_halves))
    assert decision.verdict is Verdict.PASS, decision.message
    assert decision.numbers["roles"]["fprop"] == {"expected": 10, "fp8": 10}
    assert decision.numbers["roles"]["wgrad"] == {"expected": 6, "fp8": 6}


def cut_off(model):
    """Converts, and lets a hook of a block drop the graph that the reference keeps."""
    from dataclasses import replace

    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = replace(Float8LinearConfig.from_recipe_name("tensorwise"), emulate=True)
    convert_to_float8_training(model, config=config)
    model.blocks[0].register_forward_hook(lambda module, given, output: output.detach())
    return model


def test_layers_that_the_fp8_arm_alone_cuts_off_from_the_loss_are_found():
    decision = judge_both(CASE, convert=cut_off, loss=lambda model, x: (model(x) - x).float().pow(2).mean())
    assert decision.verdict is Verdict.FAIL, decision.message
    assert "get no gradient in the FP8 arm" in decision.message


def cut_off_by_a_layers_hook(model):
    """A hook of a converted layer, whose sizes another layer has too."""
    from dataclasses import replace

    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = replace(Float8LinearConfig.from_recipe_name("tensorwise"), emulate=True)
    convert_to_float8_training(model, config=config)
    model.blocks[1].down.register_forward_hook(lambda module, given, output: output.detach())
    return model


def test_a_layer_that_a_hook_cuts_off_is_named_and_not_another_of_its_sizes():
    decision = judge_both(
        CASE, convert=cut_off_by_a_layers_hook, loss=lambda model, x: (model(x) - x.sin()).float().square().mean()
    )
    assert decision.verdict is Verdict.FAIL, decision.message
    assert "get no gradient in the FP8 arm" in decision.headline
    assert "cut off from the loss" in decision.cause
    assert "blocks.1.down" in decision.seen
    assert "blocks.0" not in decision.message
