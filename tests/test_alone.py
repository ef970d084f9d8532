"""A layer by itself: the code that times it, on a CPU with tiny layers."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from helpers.arms import spec
from pytest_fp8 import Case
from pytest_fp8.plan import from_plain
from pytest_fp8.questions.layers.evidence import LayersEvidence
from pytest_fp8.questions.pays import classes_of
from pytest_fp8.recipes import DGRAD, FPROP, RECOMPUTE, WGRAD
from pytest_fp8.worker.answers import alone
from pytest_fp8.worker.server import ArmServer

pytestmark = pytest.mark.slow

CASE = Case("micro", "torchao", "tensorwise", emulated=True)
RECIPES = ["tensorwise", "rowwise", "rowwise_with_gw_hp"]


def engine(case=CASE, **more):
    facts = {"converts_itself": False, "compiled": False, "device": torch.device("cpu"), "precision": nullcontext}
    return SimpleNamespace(case=case, **{**facts, **more})


@pytest.mark.parametrize("case", [CASE, Case("micro", "accelerate_torchao", "tensorwise", emulated=True)], ids=str)
def test_each_recipe_of_the_library_is_timed(case):
    shapes = [
        [32, 64, 16, [FPROP, DGRAD, WGRAD]],
        [32, 64, 16, [FPROP, DGRAD, WGRAD]],
        [64, 32, 16, [FPROP, RECOMPUTE]],
    ]
    one, same, other = alone.alone(engine(case), shapes, RECIPES)
    assert list(one) == ["bf16", *RECIPES]
    assert one is same
    assert all(times["rest"] > 0 == times["products"] for each in (one, other) for times in each.values())


def test_what_a_step_owes_is_what_runs(monkeypatch):
    seen = []

    class Watched(torch.nn.Linear):
        def forward(self, given):
            seen.append((given.requires_grad, self.weight.requires_grad))
            return super().forward(given)

    monkeypatch.setattr(torch.nn, "Linear", Watched)
    for owed, passes in (([FPROP, DGRAD], 1), ([FPROP, WGRAD, RECOMPUTE], 2)):
        seen.clear()
        alone.alone(engine(), [[32, 64, 16, owed]], [])
        assert set(seen) == {(DGRAD in owed, WGRAD in owed)}
        assert len(seen) == passes * (alone.WARM_UP + 1)


def test_a_conversion_of_the_users_own_is_timed_by_its_live_layers():
    class Own(torch.nn.Linear):
        calls = 0

        def forward(self, given):
            Own.calls += 1
            return super().forward(given)

    model = torch.nn.Sequential(torch.nn.Linear(32, 64), Own(32, 64)).bfloat16()
    own = engine(converts_itself=True, model=model, originals={"0": (32, 64), "1": (32, 64)})
    own.is_fp8_layer = lambda module: isinstance(module, Own)
    [times] = alone.alone(own, [[32, 64, 16, [FPROP, DGRAD, WGRAD]]], ["tensorwise"])
    assert list(times) == ["bf16", "tensorwise"]
    assert Own.calls == alone.WARM_UP + 1
    assert model[1].weight.grad is None


def test_float32_weights_run_under_autocast():
    case = Case("micro", "torchao", "tensorwise", emulated=True, autocast=True)
    [times] = alone.alone(engine(case), [[32, 64, 16, [FPROP, DGRAD, WGRAD]]], ["tensorwise"])
    assert list(times) == ["bf16", "tensorwise"]


def test_a_live_arm_leaves_what_it_is_told_to_and_times_the_rest():
    server = ArmServer(replace(spec(), leave=("2",)))
    layers = from_plain(LayersEvidence, server.answer("layers", {}))
    assert layers.converted == ["0"]
    assert str(layers.skipped["2"]) == "filter: the workload leaves '2'"
    [only] = classes_of(layers)
    assert (only.pattern, only.in_features, only.out_features, only.rows, only.count) == ("*", 32, 64, 16, 1)
    shapes = [[only.in_features, only.out_features, only.rows, list(only.owed)]]
    [times] = server.answer("alone", {"shapes": shapes, "recipes": ["tensorwise"]})
    assert times.keys() == {"bf16", "tensorwise"}
