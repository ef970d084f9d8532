"""The calls of FP8 layers in a curve: counted step by step, a few values compared, and nothing of it left behind."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest
import torch

from pytest_fp8 import Case
from pytest_fp8.arms.spec import ArmSpec
from pytest_fp8.plain import from_plain
from pytest_fp8.questions.loss.check import TOO_EXACT
from pytest_fp8.questions.loss.evidence import Curve
from pytest_fp8.worker.curve import curve
from pytest_fp8.worker.record.probe import LOOKED_AT, StepLooks
from pytest_fp8.worker.run.engine import Engine

pytestmark = pytest.mark.slow
LARGEST = 0.0035
"""Of 15731 products of sound workloads (``questions/loss/check.py``)."""


def engine(recipe="tensorwise", **more):
    return Engine(ArmSpec(Case("micro", "torchao", recipe, emulated=True, **more), "cpu", threads=1))


def calls(arm, steps=4, **how):
    return from_plain(Curve, curve(arm, 0, steps, watch=True, **how)).calls


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_each_step_has_as_many_calls_in_fp8_as_layers(recipe):
    seen = calls(engine(recipe))
    assert (list(seen.fp8), list(seen.other)) == ([14] * 4, [0] * 4)
    looks = [look for each in seen.looks.values() for look in each]
    assert sorted(look.step for look in looks) == sorted([*range(4)] * LOOKED_AT)
    assert all(0 < look.error <= LARGEST and look.of_finest > 0.5 and look.of_coarsest < 2 for look in looks)


def test_a_curve_that_fails_leaves_no_hook_on_the_optimizer():
    arm = engine()
    before = len(arm.optimizer._optimizer_step_pre_hooks)
    arm.training_batch = None
    for _ in range(2):
        with pytest.raises(TypeError):
            curve(arm, 0, 2)
    assert len(arm.optimizer._optimizer_step_pre_hooks) == before


def test_layers_that_multiply_in_bfloat16_are_counted_apart():
    arm = engine()
    layer = arm.model.model.layers[0].self_attn.q_proj
    layer.forward = lambda x: torch.nn.functional.linear(x, layer.weight, layer.bias)
    seen = calls(arm)
    assert (seen.fp8[1], seen.other[1]) == (13, 1)


def test_an_output_with_a_part_missing_is_far_off():
    arm = engine()
    layer = arm.model.model.layers[0].self_attn.q_proj
    own = layer.forward
    layer.forward = lambda x: own(x) * (torch.arange(64) < 48)
    looks = dict(calls(arm, steps=12).looks)
    broken = looks.pop("model.layers.0.self_attn.q_proj")
    assert all(look.error > 0.05 and look.of_coarsest > 100 for look in broken)
    assert all(look.error <= LARGEST for each in looks.values() for look in each)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_one_value_that_takes_the_digits_of_the_others_is_no_fault_of_the_product(recipe):
    """As weights do where training diverges. It may stand in a row and a column that are not looked at."""
    arm = engine(recipe)
    layer = arm.model.model.layers[0].self_attn.q_proj
    with torch.no_grad():
        layer.weight[0, 0] = 1e5
        layer.weight[:, 1] = 3e3
    looks = calls(arm, steps=12).looks["model.layers.0.self_attn.q_proj"]
    assert looks
    assert all(look.of_coarsest < 2 for look in looks)


def test_the_library_s_function_without_casts_is_too_exact():
    from torchao.float8.config import CastConfig, ScalingType

    arm = engine()
    layer, off = arm.model.model.layers[0].self_attn.q_proj, CastConfig(scaling_type=ScalingType.DISABLED)
    casts = [name for name in vars(layer.config) if name.startswith("cast_config")]
    layer.config = replace(layer.config, **dict.fromkeys(casts, off))
    seen = calls(arm, steps=12)
    assert (list(seen.fp8), list(seen.other)) == ([14] * 12, [0] * 12), "its autograd function is that of FP8"
    looks = dict(seen.looks)
    assert all(look.of_finest < TOO_EXACT for look in looks.pop("model.layers.0.self_attn.q_proj"))
    assert all(look.of_finest > 0.5 for each in looks.values() for look in each)


def test_copies_made_inside_a_step_do_not_take_the_hooks_along():
    arm = engine()
    arm.restart(0)
    watch = StepLooks(arm, 0)
    with watch.watching():
        watch.next_step()
        twin = copy.deepcopy(arm.model)
        stored = pickle.loads(pickle.dumps(arm.model.model.layers[0].mlp))
        arm.step(arm.training_batch(0, 0))
        counted = list(watch._calls[-1])
        twin(**arm.training_batch(0, 0))
        stored(torch.randn(16, 64).bfloat16())
        assert list(watch._calls[-1]) == counted
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in arm.model.modules())
