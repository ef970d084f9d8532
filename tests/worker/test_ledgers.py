"""The ledgers of live arms: sound workloads have no difference, and what one arm does otherwise is named.

Every other sound workload: ``python -m benchmarks.healthy``; every other fault: ``suites/controls/arms.py``."""

from __future__ import annotations

import functools
import random
import threading
import time
from collections import OrderedDict
from dataclasses import replace

import pytest

pytest.importorskip("torchao")

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from helpers.evidence import verdict_of
from helpers.loops import CASE, judge_both, ledgers, loop, routed, serve
from helpers.nets import by_torchao, net
from pytest_fp8 import Verdict
from pytest_fp8.questions.ledger.compare import compare
from pytest_fp8.worker.training.setup import takes_model

pytestmark = pytest.mark.slow

ENDS = {"enter": (32, 32), "leave": (32, 32)}


def raw():
    """Of eight products that are needed five are of Linears."""
    mixing = nn.Parameter(torch.randn(32, 32) / 6)
    return net(lambda model, x: model.leave(model.enter(x) @ model.mixing), **ENDS, mixing=mixing)


def summed():
    """A slice and a logged number before the activation."""

    def forward(model, x):
        hidden = model.enter(x)
        hidden = hidden[:48] + hidden[48:]
        model.seen = (hidden.argmax(-1) == 0).sum().item()
        return model.leave(model.activation(hidden))

    model = net(forward, **ENDS)
    model.activation = functional.gelu
    return model


class Block(nn.Module):
    """Recomputes itself, with a dropout between its Linears and one at its end."""

    def __init__(self, inside, after, reentrant):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.rates, self.reentrant, self.preserves = (inside, after), reentrant, True

    def inner(self, x):
        hidden = functional.dropout(functional.gelu(self.up(x)), self.rates[0], self.training)
        return functional.dropout(self.down(hidden), self.rates[1], self.training)

    def forward(self, x):
        return x + checkpoint(self.inner, x, use_reentrant=self.reentrant, preserve_rng_state=self.preserves)


def dropping(inside=0.1, after=0.0, reentrant=False):
    def build():
        blocks = {name: Block(inside, after, reentrant) for name in ("first_block", "second_block")}
        return nn.Sequential(OrderedDict(enter=nn.Linear(32, 32), **blocks))

    return build


class Fused(nn.LayerNorm):
    def forward(self, x):
        return functional.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


def distilled(model, x):
    """Trains on tokens that the model itself chose."""
    with torch.no_grad():
        chosen = model(x).argmax(-1)
    return (model(functional.one_hot(chosen, 32).to(x.dtype)) - x).square().mean()


SOUND = {
    "a loop": {"step": loop(2, clip=0.1, evaluate=True)},
    "a norm of an own class": {
        "build": lambda: nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 32)),
        "convert": by_torchao(then=lambda model: setattr(model[1], "__class__", Fused)),
    },
    "a slice and a logged number": {"build": summed, "loss": lambda model, x: model(x).square().mean()},
    "tokens of the model's own": {"loss": distilled},
    "recomputed": {"build": dropping(0.02, 0.2), "step": loop(2, evaluate=True)},
    "recomputed reentrantly": {"build": dropping(0.02, 0.2, True), "step": loop(2, evaluate=True)},
    "Accelerate": {"case": replace(CASE, backend="accelerate_torchao"), "build": raw},
}


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_workload_has_no_difference(name):
    both = ledgers(**SOUND[name])
    assert compare(both) == []
    assert not both.fp8.recomputed_otherwise


def test_another_activation_is_told_behind_a_slice_and_a_logged_number():
    relu = by_torchao(then=lambda model: setattr(model, "activation", functional.relu))
    verdict_of(judge_both(**SOUND["a slice and a logged number"], convert=relu), Verdict.INVALID, "relu")


def test_data_that_a_loss_draws_for_one_arm_alone_is_other_data():
    def shuffled(model, x):
        own = x + random.Random(time.perf_counter_ns()).random()
        return (model(x) - x).square().mean() + (model(own) - x).square().mean()

    assert "other inputs" in compare(ledgers(loss=shuffled))[0].headline


def test_what_no_linear_multiplies_is_counted_and_keeps_the_share_below_all():
    assert 0 < judge_both(build=raw).numbers["fp8_share"] <= 5 / 8


def test_a_pass_names_the_modules_whose_rows_a_router_chooses():
    decision = judge_both(build=routed)
    verdict_of(decision, Verdict.PASS, "not compared", *(f"experts.{index}" for index in range(3)))


def test_what_another_thread_does_meanwhile_is_no_part_of_the_step():
    stop = threading.Event()
    other = nn.Identity()

    def beat():
        while not stop.is_set():
            other(None)
            time.sleep(0.0001)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        found = serve().ledger()
    finally:
        stop.set()
        thread.join()
    assert not [call for call in found["calls"] if "Identity" in call["module"]]


# -- optimizers -------------------------------------------------------------------------------------------------------


def configure(model, weight_decay=0.1, rate=1e-3):
    """Groups of its own, as nanoGPT's model makes them."""
    first, *others = model.parameters()
    groups = [
        {"params": [first], "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0, "lr": rate / 10},
    ]
    return torch.optim.AdamW(groups, lr=rate)


def test_a_function_whose_argument_is_called_model_is_given_the_model_in_both_arms():
    both = ledgers(optimizer=configure)
    for arm in (both.reference, both.fp8):
        made = arm.optimizer
        assert [name for name, group in made.members.items() if group == 0] == ["enter.weight"]
        assert [(group["weight_decay"], group["lr"]) for group in made.groups] == [("0.1", "0.001"), ("0", "0.0001")]
    assert takes_model(functools.partial(configure, weight_decay=0.1))
    assert not takes_model(lambda models: None)
    assert not takes_model(functools.partial(configure, None))
