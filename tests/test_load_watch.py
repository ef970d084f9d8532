"""FP8 layers that keep a copy of their weight: one that a load does not renew is named, a sound one is left alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torchao")

from controls import own_checkpoints as saved
from helpers.carried import CASE, carried, through
from helpers.loops import loop, serve
from pytest_fp8 import Verdict
from pytest_fp8.codes import K
from pytest_fp8.worker.record.probe import StaleCopies

pytestmark = pytest.mark.slow

LIBRARY = ["safetensors"]


def loss(model, rows):
    return (model(rows) - rows.sin()).float().pow(2).mean()


def caching(renewed_by, everywhere=True):
    """``convert`` whose layers multiply by a kept copy of their weight: in all forward passes, or in evaluations."""

    def convert(model):
        import torch
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
        from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

        convert_to_float8_training(model, config=Float8LinearConfig(emulate=True))

        def keep(layer):
            kept = {}
            layer.drop = kept.clear
            if "backward" in renewed_by and layer.weight.requires_grad:
                layer.weight.register_hook(lambda gradient: kept.clear())
            if "load" in renewed_by:
                layer.register_load_state_dict_post_hook(lambda *_: kept.clear())

            def forward(x):
                weight = layer.weight
                if "version" in renewed_by and kept.get("version") != weight._version:
                    kept.clear()
                if everywhere or not torch.is_grad_enabled():
                    copy = kept.setdefault("copy", weight.detach().clone())
                    kept.setdefault("version", weight._version)
                    weight = weight + (copy - weight).detach()
                product = matmul_with_hp_or_float8_args.apply
                return product(x, weight.t(), layer.linear_mm_config, layer.config) + layer.bias

            layer.forward = forward

        for layer in list(model.modules()):
            if "Float8Linear" in type(layer).__name__:
                keep(layer)
        return model

    return convert


def decision_of(convert, *stores, **parts):
    return carried(through(*stores), **{"loss": loss, "convert": convert, **parts})


@pytest.mark.parametrize(("renewed_by", "everywhere"), [("backward", True), ("nothing", False)])
def test_a_copy_that_load_state_dict_does_not_renew_is_named(renewed_by, everywhere):
    decision = decision_of(caching(renewed_by, everywhere), *LIBRARY)
    assert decision.verdict is Verdict.FAIL, decision.message
    assert decision.code is K.STALE_COPIES
    assert "bf16 -> fp8" in decision.headline
    assert "blocks.0.down" in decision.message


@pytest.mark.parametrize("renewed_by", ["version", "backward, load"])
def test_a_sound_copy_is_left_alone(renewed_by):
    case = replace(CASE, recipe="rowwise", checkpoint_formats=("safetensors",))
    decision = carried(case, convert=caching(renewed_by), step=loop(2))
    assert decision.verdict is Verdict.PASS, decision.message


OWN = {name: getattr(saved, name) for name in ("build", "batch", "optimizer", "save", "load")}


def test_the_users_own_load_is_asked_in_place_of_load_state_dict():
    stale = decision_of(caching("backward"), "own", **OWN)
    assert stale.verdict is Verdict.FAIL, stale.message
    assert stale.code is K.STALE_COPIES

    def renewing(model, optimizer, folder):
        saved.load(model, optimizer, folder)
        for layer in model.modules():
            if hasattr(layer, "drop"):
                layer.drop()

    for convert, load in ((caching("backward"), renewing), (caching("backward, load"), saved.load)):
        decision = decision_of(convert, "safetensors", "own", **{**OWN, "load": load})
        assert decision.verdict is Verdict.PASS, decision.message


def test_a_frozen_weight_may_be_kept_for_good():
    def build():
        net = saved.build()
        net.up.requires_grad_(False)
        return net

    import torch

    engine = serve(CASE, build=build, batch=saved.batch, loss=loss, convert=caching("backward")).engine
    state = {name: value.clone() for name, value in engine.model.state_dict().items()}
    with torch.no_grad():
        for parameter in engine.model.parameters():
            parameter.neg_()
    watch = StaleCopies(engine)
    watch.before()
    engine.model.load_state_dict(state)
    assert watch.stale() == ["down"]


def test_of_a_model_that_cannot_be_evaluated_the_pass_says_so():
    def build():
        import torch

        class Trains(torch.nn.Sequential):
            def forward(self, rows):
                assert self.training, "made for training"
                return super().forward(rows)

        return Trains(torch.nn.Linear(32, 64), torch.nn.SiLU(), torch.nn.Linear(64, 32))

    decision = decision_of(caching("backward, load"), *LIBRARY, build=build)
    assert decision.verdict is Verdict.PASS, decision.message
    assert "FP8 copies of weights was not checked: no evaluation of the model: AssertionError" in decision.headline
