"""Curves of live arms: what is read beside the training changes no number of it, and says what happened."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from types import SimpleNamespace

import pytest
import torch

from helpers.loops import serve
from pytest_fp8 import Case
from pytest_fp8.arms.spec import ArmSpec
from pytest_fp8.plain import from_plain
from pytest_fp8.questions.layers.products import Product
from pytest_fp8.questions.loss.evidence import Curve, ProductCount
from pytest_fp8.worker import curve as curves
from pytest_fp8.worker.record.gradients import norm_of
from pytest_fp8.worker.record.tables import counted_step
from pytest_fp8.worker.run.engine import Engine
from pytest_fp8.worker.state.weights import moved_weights
from pytest_fp8.worker.tensors import values

pytestmark = pytest.mark.slow


@cache
def engine(recipe="tensorwise", **more):
    """Shared: a curve starts anew."""
    return Engine(ArmSpec(Case("micro", "torchao", recipe, emulated=True, **more), "cpu", threads=1))


def curve(arm, seed=0, steps=4, **how):
    return from_plain(Curve, curves.curve(arm, seed, steps, **how))


@cache
def forward():
    """Of the 14 FP8 layers, and of what BF16 has beside them: the head, and in some versions of transformers the rotary
    embedding."""
    reference = Case("micro", "torchao", "tensorwise", emulated=True).reference()
    watched = curve(Engine(ArmSpec(reference, "cpu", threads=1)), watch=True)
    return ProductCount(14, watched.last_products["forward"].other - 14)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise_with_gw_hp"])
def test_a_watched_curve_is_equal_to_the_last_bit(recipe):
    arm = engine(recipe)
    plain, watched = curve(arm), curve(arm, watch=True)
    assert watched.losses == plain.losses
    assert watched.gradient_norms == plain.gradient_norms
    assert watched.movement == plain.movement
    assert not plain.last_products
    backward = ProductCount(28, 2) if recipe == "tensorwise" else ProductCount(14, 16)
    assert watched.first_products == watched.last_products == {"forward": forward(), "backward": backward}


def test_noise_moves_the_losses_by_little_and_the_optimizer_steps_the_arms_own_weights():
    arm = engine()
    plain, noisy, later = curve(arm), curve(arm, noise=1), curve(arm, noise=1, noise_from=2)
    assert noisy == curve(arm, noise=1)
    assert noisy.losses != curve(arm, noise=2).losses
    assert noisy.data == plain.data
    assert later.losses[:2] == plain.losses[:2]
    assert later.losses[2] != plain.losses[2]
    off = [abs(one - two) for one, two in zip(noisy.losses, plain.losses, strict=True)]
    assert 0 < max(off) < 0.05
    assert curve(arm) == plain


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_weight_that_something_else_steps_keeps_its_update(when):
    """An optimizer that runs in the backward pass, before noise is taken back."""
    arm = serve(loss=lambda model, x: model(x).float().square().mean()).engine
    weight = next(p for p in arm.model.parameters() if p.dim() > 1)
    with torch.no_grad(), moved_weights(arm, seed=3) as put_back:
        own = weight.detach().clone()
        put_back() if when == "after" else None
        weight.view(-1)[:4] += 1
    put_back()
    off = (weight.detach() - own).float().view(-1)
    assert off[:4].mean() == pytest.approx(1, abs=0.1)
    assert off[4:].abs().max() < 0.1


def test_recomputed_products_are_counted_by_themselves():
    watched = curve(engine(activation_checkpointing=True), watch=True)
    assert watched.last_products["recompute"].fp8 > 0
    assert watched.last_products["forward"] == forward()


def test_on_a_gpu_the_watched_step_is_the_profiled_one(monkeypatch):
    """Products of an evaluation inside the step are left out."""
    phases = [("forward", "fp8"), ("forward", "bfloat16"), ("backward", "fp8"), ("evaluation", "fp8")]
    products = [Product(phase, 64, (64, 64), kind, "mm") for phase, kind in phases]

    def profiled(step):
        step(lambda name: nullcontext())
        return {"products": products}

    arm, ran = engine(), []
    monkeypatch.setattr("pytest_fp8.worker.record.tables.profile_step", profiled)
    on_gpu = SimpleNamespace(device=SimpleNamespace(type="cuda"), step=arm.step)
    arm.restart(0)
    loss, counts = counted_step(on_gpu, arm.training_batch(0, 0), lambda: ran.append(1))
    assert float(loss) == curve(arm).losses[0]
    assert ran == [1]
    assert counts == {"forward": ProductCount(1, 1), "backward": ProductCount(1, 0)}


def test_weights_move_where_the_optimizer_moves_them(monkeypatch):
    arm = engine()
    moved = curve(arm).movement
    assert set(moved) == {name for name, _ in arm.model.named_parameters()}
    query, embedding = moved["model.layers.0.self_attn.q_proj.weight"], moved["model.embed_tokens.weight"]
    assert query.moved > 0.9
    assert query.reached == 1.0
    assert embedding.moved == pytest.approx(embedding.reached, abs=0.01), "rows of tokens that never came"
    assert embedding.reached < 0.5
    monkeypatch.setattr(arm.optimizer, "step", lambda: None)
    still = curve(arm).movement
    assert {one.moved for one in still.values()} == {0.0}
    assert still["model.layers.0.self_attn.q_proj.weight"].reached == 1.0


def test_only_what_trains_is_listed_and_adapters_are():
    moved = curve(engine(lora=8)).movement
    assert moved
    assert all("lora_" in name for name in moved)


def test_gradient_norms_have_more_bits_than_bfloat16():
    one, other = torch.full((64,), 1.0).bfloat16(), torch.full((64,), 1.0).bfloat16()
    other[0] = 1.0078125
    assert norm_of([one]) != norm_of([other])
    assert norm_of([one, one]) == pytest.approx(2 * 64**0.5 / 2**0.5)
    assert norm_of([]) == 0


def test_a_weight_that_is_stored_in_fp8_is_sampled_by_its_values():
    from torchao.quantization import Float8WeightOnlyConfig, quantize_

    model = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False)).to(torch.bfloat16)
    quantize_(model, Float8WeightOnlyConfig())
    first = values(model[0].weight)
    assert first.dtype == torch.uint8
    assert torch.equal(first, values(model[0].weight))
