"""A workload's own conversion to FP8, in live arms: what it may leave, and what it must keep."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torchao")

from helpers.loops import judge, loop, serve
from pytest_fp8 import Verdict

pytestmark = pytest.mark.slow


def convert_but(*left):
    def convert(model):
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = replace(Float8LinearConfig.from_recipe_name("tensorwise"), emulate=True)
        convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name not in left)

    return convert


def test_an_own_conversion_that_skips_a_layer_without_a_reason_fails():
    decision = judge(serve(step=loop(), convert=convert_but("blocks.1.down")))
    assert decision.verdict is Verdict.FAIL
    assert "neither converted nor left with a reason" in decision.headline
    assert "blocks.1.down" in decision.seen
    assert "Workload(leave=" in decision.next_step


def test_a_layer_that_the_workload_leaves_is_skipped_with_that_reason():
    decision = judge(serve(step=loop(), convert=convert_but("blocks.1.down"), leave=("blocks.1.*",)))
    assert decision.verdict is Verdict.FAIL, "blocks.1.up is left by name and was converted"
    decision = judge(serve(step=loop(), convert=convert_but("blocks.1.down"), leave=("*.1.down",)))
    assert decision.verdict is Verdict.PASS, decision.message
    assert decision.numbers["skipped"] == {"filter: the workload leaves '*.1.down'": 1}
    decision = judge(serve(step=loop(), leave=("*.down",)))
    assert decision.verdict is Verdict.PASS, decision.message
    assert decision.numbers["skipped"] == {"filter: the workload leaves '*.down'": 2}


def test_an_own_conversion_that_renames_layers_is_an_error():
    def convert(model):
        import torch

        convert_but()(model)
        return torch.nn.Sequential(model)

    with pytest.raises(LookupError, match=r"must keep the names.* gone: enter, .* and 1 more") as error:
        serve(step=loop(), convert=convert)
    assert "return the model itself" in error.value.fp8_next
