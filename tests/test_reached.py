"""A layer's call whose output reaches no backward pass has no gradients to compute; all others have."""

from __future__ import annotations

import pytest

pytest.importorskip("torchao")

import torch
from torch.utils.checkpoint import checkpoint
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from helpers.evidence import verdict_of
from helpers.loops import CASE, batch, judge, judge_both, serve
from pytest_fp8 import Verdict
from pytest_fp8.codes import L
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


def detached(model):
    return model["b"](model["a"](X).detach()).sum()


def called_twice(model):
    hidden = model["a"](X)
    return model["b"](hidden).sum() + model["b"](hidden.detach() + 1).detach().sum()


def changed_in_place(model):
    hidden = model["a"](X)
    hidden[..., :2] *= 2
    hidden += 1
    return model["b"](hidden).sum()


def changed_in_a_view(model):
    """Three dimensions with a bias: the output is a view, whose own node the backward pass goes past."""
    hidden = model["a"](X.view(2, 2, 8))
    hidden[..., :2] *= 2
    return model["b"](hidden).sum()


def no_tensor(model):
    model["a"].register_forward_hook(lambda module, given, output: {"out": output})
    return model["a"](X)["out"].sum()


X = torch.randn(4, 8)


@pytest.mark.parametrize(
    ("loss", "owed"),
    [
        (detached, [("a", False, False), ("b", False, True)]),
        (called_twice, [("a", False, True), ("b", True, True), ("b", False, False)]),
        (changed_in_place, [("a", False, True), ("b", True, True)]),
        (changed_in_a_view, [("a", False, True), ("b", True, True)]),
        (no_tensor, [("a", False, True)]),
    ],
)
def test_a_call_owes_gradients_where_the_backward_pass_reaches_it(loss, owed):
    model = pair()
    assert watched(model, lambda: loss(model)) == owed


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kept", [False, True], ids=["detached", "reached"])
def test_recomputed_calls_are_told_apart(reentrant, kept):
    model, x = pair(), X.clone().requires_grad_()

    def loss():
        hidden = checkpoint(model["a"], x, use_reentrant=reentrant)
        return model["b"](hidden if kept else hidden.detach()).sum()

    seen = {name: gradients for name, *gradients in watched(model, loss)}
    assert seen["b"] == [kept, True]
    # A first pass without gradients that is never repeated is no call that trains.
    assert seen.get("a", [False, False]) == [kept, kept]


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


@pytest.mark.parametrize("cut", ["blocks.0", "blocks.1.down"])
def test_what_the_fp8_arm_alone_cuts_off_from_the_loss_is_named(cut):
    """By a hook, of a block or of a layer whose sizes another layer has too."""

    def convert(model):
        convert_to_float8_training(model, config=Float8LinearConfig(emulate=True))
        model.get_submodule(cut).register_forward_hook(lambda module, given, output: output.detach())
        return model

    decision = judge_both(CASE, convert=convert, loss=lambda model, x: (model(x) - x.sin()).float().square().mean())
    verdict_of(decision, Verdict.FAIL, L.NO_GRADIENT, cut)
