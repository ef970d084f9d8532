"""Adapters beside FP8: which products run in which precision, and the order of adapters and conversion."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

pytest.importorskip("torchao")
pytest.importorskip("peft")

from pytest_fp8 import Case, Verdict
from pytest_fp8.arms.process import ArmProcess
from pytest_fp8.arms.spec import ArmSpec
from pytest_fp8.codes import R
from pytest_fp8.markers import why_not
from pytest_fp8.plain import from_plain
from pytest_fp8.questions.layers.check import check_layers
from pytest_fp8.questions.layers.evidence import LayersEvidence
from pytest_fp8.questions.layers.products import role_table
from pytest_fp8.worker.error_trace import known_cause
from pytest_fp8.zoo.shapes import SHAPES

pytestmark = pytest.mark.slow

CASE = Case("micro", "torchao", "tensorwise", lora=8, emulated=True)
BLOCKS, PROJECTIONS = SHAPES["micro"].layers, 7
BASE = BLOCKS * PROJECTIONS
FIRST = [f"base_model.model.model.layers.0.self_attn.{name}_proj.base_layer" for name in "qkv"]
"""The Linears that take the embedding's output, which needs no gradient where the embedding is frozen."""


@pytest.fixture(scope="module")
def evidence():
    arm = ArmProcess(fork=True)
    arm.build(ArmSpec(CASE, "cpu", None, threads=1))
    yield from_plain(LayersEvidence, arm.request("layers"))
    arm.close()


def adapter(name):
    return ".lora_A." in name or ".lora_B." in name


def ran(evidence, role, *, adapters):
    return [a for a in evidence.step().attributions if a.role == role and adapter(a.layer) == adapters]


# -- what a step of a case with adapters executes -----------------------------------------------------------------


def test_the_base_is_converted_and_each_adapter_stays_with_its_reason(evidence):
    assert check_layers(CASE, evidence).verdict is Verdict.PASS
    assert len(evidence.live_fp8) == BASE
    assert all(name.endswith(".base_layer") for name in evidence.live_fp8)
    left = [name for name in evidence.skipped if adapter(name)]
    assert len(left) == 2 * BASE
    assert {str(evidence.skipped[name]) for name in left} == {"adapter: LoRA matrices stay in high precision"}
    assert {evidence.kinds[name] for name in left} == {"torch.nn.modules.linear.Linear"}


def test_adapters_multiply_in_bfloat16_in_every_role(evidence):
    for role, expected in (("fprop", 2 * BASE), ("dgrad", 2 * BASE - len(FIRST)), ("wgrad", 2 * BASE)):
        assert Counter(a.kind for a in ran(evidence, role, adapters=True)) == {"bfloat16": expected}


def test_a_frozen_base_needs_no_weight_gradient(evidence):
    base = [call for call in evidence.calls if not adapter(call.name)]
    assert not any("wgrad" in call.owed for call in base)
    assert not ran(evidence, "wgrad", adapters=False)
    assert "wgrad" not in role_table(evidence.step(), evidence.calls)


# -- order, on live models ----------------------------------------------------------------------------------------


def build():
    from pytest_fp8.zoo import models

    return models.build("micro", seed=0, device="cpu")


def adapted(model, rank=8):
    import torch

    from pytest_fp8.zoo.adapters import add_adapters

    torch.manual_seed(1)
    return add_adapters(model, rank)


def loss(model):
    from pytest_fp8.zoo import data, training

    shape = SHAPES["micro"]
    return training.language_model_loss(compiled=False)(model, data.text_batch(shape.batch, shape.seq, 0, 0))


def test_adapters_start_at_zero_and_only_they_are_trained():
    plain, model = build(), adapted(build())
    assert loss(model).item() == loss(plain).item()
    assert {adapter(name) for name, p in model.named_parameters() if p.requires_grad} == {True}
    assert {str(p.dtype) for p in model.parameters()} == {"torch.bfloat16"}


def test_the_layers_question_fails_on_converted_adapters(evidence):
    live = [*evidence.live_fp8, *(name for name in evidence.skipped if adapter(name))]
    decision = check_layers(CASE, replace(evidence, live_fp8=live))
    assert decision.verdict is Verdict.FAIL
    assert "left alone (adapter: " in decision.expected


def test_a_target_without_a_linear_of_that_name_is_refused():
    from pytest_fp8.zoo.adapters import add_adapters

    with pytest.raises(ValueError, match="not found in the base model") as error:
        add_adapters(build(), 8, ("gate",))
    assert known_cause(error.value)[0] is R.UNKNOWN_NAME


# -- cases --------------------------------------------------------------------------------------------------------


def test_without_peft_a_case_with_adapters_is_skipped_with_what_to_install(monkeypatch):
    from pytest_fp8.options import Settings

    monkeypatch.setattr("importlib.util.find_spec", lambda name, *_: None if name == "peft" else object())
    reason, failure = why_not(CASE, Settings())
    assert "pip install 'peft>=0.17'" in reason
    assert not failure
