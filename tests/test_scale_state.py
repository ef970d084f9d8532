"""What an arm does with its scaling state: writes it, loses it, loads it again."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from controls.checkpoints import ScalesNotLoaded
from helpers.evidence import transfer, verdict_of
from pytest_fp8 import Verdict
from pytest_fp8.backends.base import Scaling
from pytest_fp8.backends.transformer_engine import TRUST, TransformerEngine
from pytest_fp8.questions.checkpoints.check import check_checkpoints
from pytest_fp8.worker.checkpoint.scales import carry_scales

pytestmark = pytest.mark.slow


def decided(scales):
    return check_checkpoints([transfer(scales=scales)])


class Layer(torch.nn.Module):
    """Keeps its state as Transformer Engine does: in bytes, of which a new layer has none, refused unless allowed."""

    takes_state = True

    def __init__(self, trained=True):
        super().__init__()
        self.state = {"scale": torch.full((3,), 0.5 if trained else 1.0), "amax": torch.zeros(4, 3)}
        if trained:
            self.state["amax"] += 7.0
        self.stepped = trained

    def get_extra_state(self):
        whole = torch.cat([value.reshape(-1) for value in self.state.values()])
        return whole.view(torch.uint8).clone() if self.stepped else torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, given):
        if os.environ.get(TRUST) != "1":
            raise RuntimeError("Refusing to load pickled state.")
        if self.takes_state:
            whole = given.view(torch.float32)
            self.state = {"scale": whole[:3].clone(), "amax": whole[3:].reshape(4, 3).clone()}


class Backend:
    trusting_scaling_state = TransformerEngine.trusting_scaling_state

    def __init__(self, renewable=True):
        self.renewable = renewable

    def is_scaling_state(self, key):
        return key.endswith("_extra_state")

    def is_fp8_layer(self, module):
        return isinstance(module, Layer)

    def scaling(self, layer):
        return Scaling(layer.state, {})

    def new_layer(self, module):
        return type(module)(trained=False) if self.renewable else None

    def reset_scaling(self, model):
        for layer in model:
            layer.state = Layer(trained=False).state


def told(folder, layer=Layer, **backend):
    engine = SimpleNamespace(model=torch.nn.Sequential(layer(), layer()), backend=Backend(**backend))
    return carry_scales(engine, folder / "scales"), engine


def test_an_arm_writes_loses_and_loads_its_scaling_state(tmp_path, monkeypatch):
    monkeypatch.delenv(TRUST, raising=False)
    found, engine = told(tmp_path)
    assert len(found.stored) == 4
    assert found.stored == found.loaded == found.fresh
    assert all(found.reset[name] != found.stored[name] for name in found.stored)
    assert (found.no_place, found.refused, found.failed) == (2, "Refusing to load pickled state.", "")
    assert float(engine.model[0].state["scale"][0]) == 0.5
    assert TRUST not in os.environ
    monkeypatch.setenv(TRUST, "1")
    assert told(tmp_path / "allowed")[0].refused == ""
    assert os.environ[TRUST] == "1"


def test_layers_that_do_not_take_their_state_are_found(tmp_path):
    class Deaf(Layer):
        takes_state = False

    found, _ = told(tmp_path, Deaf)
    assert found.loaded == found.reset
    verdict_of(decided(found), Verdict.FAIL, "4 differ, 4 of them as in a model without a step")


def test_the_control_that_drops_scaling_state_is_caught_in_its_words(tmp_path):
    engine = SimpleNamespace(model=torch.nn.Sequential(Layer(), Layer()), backend=Backend())
    ScalesNotLoaded.converted(SimpleNamespace(fp8_layers=lambda: list(engine.model)), engine.model)
    decision = decided(carry_scales(engine, tmp_path / "scales"))
    verdict_of(decision, Verdict[ScalesNotLoaded.verdicts[0]], "4 differ, 4 of them as in a model without a step")
    assert decision.code is ScalesNotLoaded.code


def test_layers_that_cannot_be_made_anew_are_left_out(tmp_path):
    assert told(tmp_path, renewable=False)[0].fresh == {}


def test_an_error_of_the_library_is_told_and_ends_nothing(tmp_path):
    class Broken(Layer):
        def set_extra_state(self, given):
            raise KeyError("scale_fwd")

    found, _ = told(tmp_path, Broken)
    assert found.failed == "KeyError: 'scale_fwd'"
    verdict_of(decided(found), Verdict.PASS, "does not come back from FP8 to FP8 through dcp: KeyError")


def test_bytes_that_nobody_wrote_are_not_unpickled(tmp_path, monkeypatch):
    """The folder is the session's own; should it be changed all the same, nothing of it is loaded."""
    from pytest_fp8.worker.checkpoint import stores

    read = stores.read

    def changed(*arguments):
        tensors, data = read(*arguments)
        return {name: value ^ 1 for name, value in tensors.items()}, data

    monkeypatch.setattr(stores, "read", changed)
    found, engine = told(tmp_path)
    assert "the store holds other bytes than were written" in found.failed
    assert float(engine.model[0].state["scale"][0]) == 0.5


def test_an_arm_without_scaling_state_says_so(tmp_path):
    engine = SimpleNamespace(model=torch.nn.Sequential(torch.nn.Linear(2, 2)), backend=Backend())
    assert carry_scales(engine, tmp_path / "scales").stored == {}
    assert not (tmp_path / "scales").exists()
