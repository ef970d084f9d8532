"""Curves of live arms: what is read beside the training changes no number of it, and says what happened: in each step
the calls of FP8 layers, a few of their values, how far weights moved; and runs that are all one."""

from __future__ import annotations

import copy
import pickle
from functools import cache

import pytest
import torch

from helpers.nets import CASE, serve
from pytest_fp8 import Case
from pytest_fp8.arms.spec import ArmSpec
from pytest_fp8.plain import from_plain
from pytest_fp8.questions.loss.evidence import Curve, ProductCount
from pytest_fp8.worker import curve as curves
from pytest_fp8.worker.record import probe
from pytest_fp8.worker.record.probe import LOOKED_AT, StepLooks
from pytest_fp8.worker.run.engine import Engine
from pytest_fp8.worker.state.weights import ROUNDING, copy_values, moved_weights

pytestmark = pytest.mark.slow


LARGEST = 0.0035
"""Of 15731 products of sound workloads (``questions/loss/check.py``)."""


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
    # In each step as many calls in FP8 as layers, of which a few are looked at.
    seen = watched.calls
    assert (list(seen.fp8), list(seen.other)) == ([14] * 4, [0] * 4)
    looks = [look for each in seen.looks.values() for look in each]
    assert sorted(look.step for look in looks) == sorted([*range(4)] * LOOKED_AT)
    assert all(0 < look.error <= LARGEST and look.of_finest > 0.5 and look.of_coarsest < 2 for look in looks)


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
    arm = serve().engine
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


# -- calls of FP8 layers ----------------------------------------------------------------------------------------------


def changed():
    """An engine of its own, and a layer to be changed."""
    arm = engine.__wrapped__()
    return arm, arm.model.model.layers[0].self_attn.q_proj


CHANGED = "model.layers.0.self_attn.q_proj"


def calls(arm, steps=4):
    return curve(arm, steps=steps, watch=True).calls


@pytest.mark.parametrize(("put", "exact"), [(0.0, False), (None, True)], ids=["dropped", "of BF16"])
def test_what_a_users_hook_puts_in_the_output_s_place_is_looked_at_for_fp8_alone(monkeypatch, put, exact):
    """A hook may drop an output now and then: its product is right all the same."""
    monkeypatch.setattr(probe, "LOOKED_AT", 14)
    arm, layer = changed()

    def hook(module, args, made):
        return made * put if put is not None else torch.nn.functional.linear(args[0], module.weight)

    layer.register_forward_hook(hook)
    looks = calls(arm).looks[CHANGED]
    assert all(look.error <= LARGEST for look in looks)
    assert all((look.of_finest < 0.01) is exact for look in looks)


def test_one_value_that_takes_the_digits_of_the_others_is_no_fault_of_the_product():
    """As weights do where training diverges. It may stand in a row and a column that are not looked at."""
    arm, layer = changed()
    with torch.no_grad():
        layer.weight[0, 0] = 1e5
        layer.weight[:, 1] = 3e3
    looks = calls(arm, steps=12).looks[CHANGED]
    assert looks
    assert all(look.of_coarsest < 2 for look in looks)


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


# -- seeds that all give one training run: weights that are loaded, batches that depend on their step alone -----------


def build():
    """As many people write it: whatever the seed, the same weights."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))


def batch(step):
    return torch.randn(32, 32, generator=torch.Generator().manual_seed(step))


def test_weights_that_a_build_seeds_are_moved_by_the_seed_in_both_arms_alike():
    servers = [serve(case, build=build, batch=batch) for case in (CASE, CASE.reference())]

    def losses(server, seed, jitter):
        return tuple(server.curve(seed, 4, jitter=jitter)["losses"])

    for server in servers:
        assert losses(server, 1, False) == losses(server, 0, False), "one run"
        moved = [losses(server, seed, True) for seed in (1, 2, 1)]
        assert moved[0] == moved[2] != moved[1]
    weights = []
    for server in servers:
        server.engine.restart(seed=3, jitter=True)
        weights.append([parameter.detach().float().clone() for parameter in server.engine.model.parameters()])
    assert all(fp8.equal(reference) for fp8, reference in zip(*weights, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("target", [torch.empty(40, 60), torch.empty(60, 40).t()], ids=["plain", "transposed"])
def test_each_weight_is_moved_by_at_most_one_rounding_and_each_by_another(target, dtype):
    def start(seed):
        model = torch.nn.Linear(1, 1, bias=False)
        model.weight = torch.nn.Parameter(target.to(dtype, copy=True))
        copy_values(model, {"weight": torch.ones(40, 60, dtype=torch.bfloat16).to(dtype)}, seed)
        return model.weight.detach()

    found = start(0)
    assert ROUNDING / 2 < (found.float() - 1).abs().max() <= ROUNDING
    assert len(found.unique()) >= (2 if dtype is torch.bfloat16 else 2300), "as many ways as the type can show"
    assert found.equal(start(0))
    assert not found.equal(start(1))
