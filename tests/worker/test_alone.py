"""A layer by itself: the code that times it, on a CPU with tiny layers."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from helpers.arms import spec
from helpers.nets import net
from pytest_fp8 import Case
from pytest_fp8.plan import from_plain
from pytest_fp8.questions.layers.evidence import LayersEvidence
from pytest_fp8.questions.pays import AloneEvidence, classes_of
from pytest_fp8.recipes import DGRAD, FPROP, RECOMPUTE, WGRAD
from pytest_fp8.worker.answers import alone
from pytest_fp8.worker.server import ArmServer

pytestmark = pytest.mark.slow

MICRO = Case("micro", "torchao", "tensorwise", emulated=True)
RECIPES = ["tensorwise", "rowwise", "rowwise_with_gw_hp"]


def engine(case=MICRO, **more):
    facts = {"converts_itself": False, "compiled": False, "device": torch.device("cpu"), "precision": nullcontext}
    return SimpleNamespace(case=case, **{**facts, **more})


ALL = [FPROP, DGRAD, WGRAD]


@pytest.mark.parametrize("case", [MICRO, Case("micro", "accelerate_torchao", "tensorwise", emulated=True)], ids=str)
def test_a_group_is_timed_in_each_recipe_with_each_member_left(case):
    found = alone.together(engine(case), [(32, 64), (32, 16)], 16, ALL, RECIPES)
    assert list(found["recipes"]) == RECIPES
    for times in found["recipes"].values():
        assert len(times["without"]) == 2
        assert all(each["rest"] > 0 == each["products"] for each in (found["none"], times["all"], *times["without"]))
    single = alone.together(engine(case), [(32, 64)], 16, [FPROP, RECOMPUTE], ["rowwise"])
    assert single["recipes"]["rowwise"]["without"] == [single["none"]]


def test_what_a_step_owes_is_what_runs(monkeypatch):
    seen = []

    class Watched(torch.nn.Linear):
        def forward(self, given):
            seen.append((given.requires_grad, self.weight.requires_grad))
            return super().forward(given)

    monkeypatch.setattr(torch.nn, "Linear", Watched)
    for owed, passes in (([FPROP, DGRAD], 1), ([FPROP, WGRAD, RECOMPUTE], 2)):
        seen.clear()
        alone.together(engine(), [(32, 64)], 16, owed, [])
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
    alone.together(own, [(32, 64)], 16, ALL, ["tensorwise"])
    assert Own.calls == alone.WARM_UP + 1
    assert model[1].weight.grad is None


def attention():
    """q and k share an input, o and what is left have their own."""

    def forward(model, x):
        return model.left(model.o(model.q.forward(x) * model.k(x)))

    return net(forward, **dict.fromkeys(("q", "k", "o", "left"), (32, 32)))


def test_layers_that_share_an_input_are_one_group_in_a_live_arm_which_leaves_what_it_is_told_to():
    server = ArmServer(replace(spec(build=attention), leave=("left",)))
    layers = from_plain(LayersEvidence, server.answer("layers", {}))
    assert str(layers.skipped["left"]) == "filter: the workload leaves 'left'"
    classes = classes_of(layers)
    asked = [[each.layer, each.in_features, each.out_features, each.rows, list(each.owed)] for each in classes]
    found = from_plain(AloneEvidence, server.answer("alone", {"layers": asked, "recipes": ["tensorwise"]}))
    assert [[classes[index].pattern for index in group.members] for group in found.groups] == [["q", "k"], ["o"]]
    assert [len(group.recipes["tensorwise"].without) for group in found.groups] == [2, 1]
