"""FP8 through Accelerate and the Trainer: options in the environment, conversions that stop, ties and optimizers."""

from __future__ import annotations

import pytest

from pytest_fp8 import Case
from pytest_fp8.recipes import Stays

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.slow


def blocks(odd=32):
    """An embedding tied to a head, and a block whose middle Linear may be of odd size."""
    from torch import nn

    block = nn.ModuleDict({"q": nn.Linear(32, 32), "router": nn.Linear(32, odd), "k": nn.Linear(32, 32)})
    model = nn.ModuleDict({"embed": nn.Embedding(64, 32), "block": block, "lm_head": nn.Linear(32, 64, bias=False)})
    model["lm_head"].weight = model["embed"].weight
    return model


def test_what_accelerate_is_meant_to_convert_with_each_library():
    from pytest_fp8.backends.accelerate import AccelerateTorchAO, AccelerateTransformerEngine

    te, ao = (kind().planned(blocks(10), None) for kind in (AccelerateTransformerEngine, AccelerateTorchAO))
    assert te.converted == ["block.q", "block.k", "lm_head"]
    assert te.skipped["block.router"].text.startswith("out_features=10")
    assert ao.converted == ["block.k"]
    assert ao.skipped["block.q"].kind is Stays.EDGE
    assert ao.skipped["lm_head"].kind is Stays.HEAD


def test_every_option_of_the_recipe_is_in_the_environment():
    from pytest_fp8.backends.trainer import fp8_environment

    asked = fp8_environment(
        "TE", Case("1b", "trainer_te", "delayed", {"margin": 2, "amax_compute_algo": "max"}).full_options
    )
    assert asked == {
        "ACCELERATE_MIXED_PRECISION": "fp8",
        "ACCELERATE_FP8_BACKEND": "TE",
        "ACCELERATE_FP8_FORMAT": "HYBRID",
        "ACCELERATE_FP8_AMAX_HISTORY_LEN": "1024",
        "ACCELERATE_FP8_AMAX_COMPUTE_ALGO": "max",
        "ACCELERATE_FP8_MARGIN": "2",
    }


@pytest.fixture
def stand_in(monkeypatch):
    """A transformer_engine whose te.Linear is an nn.Linear; the Python of Accelerate and of this package is real."""
    import sys
    import types
    from importlib.machinery import ModuleSpec

    package, module = types.ModuleType("transformer_engine"), types.ModuleType("transformer_engine.pytorch")

    class Linear(torch.nn.Linear):
        def __init__(self, inputs, outputs, bias=True, params_dtype=None):
            super().__init__(inputs, outputs, bias=bias, dtype=params_dtype)

    module.Linear, module.LayerNorm, package.pytorch = Linear, torch.nn.LayerNorm, module
    package.__spec__ = ModuleSpec("transformer_engine", None)  # which Accelerate looks for
    monkeypatch.setitem(sys.modules, "transformer_engine", package)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", module)
    return module


def test_live_layers_get_one_class_that_is_not_compiled(stand_in):
    from pytest_fp8.backends.accelerate import keep_out_of_compiled_code
    from pytest_fp8.worker.answers.layers import class_path

    model = torch.nn.Sequential(stand_in.Linear(16, 16), torch.nn.Linear(16, 16), stand_in.Linear(16, 16))
    keep_out_of_compiled_code(model)
    assert type(model[0]) is type(model[2])
    assert isinstance(model[0], stand_in.Linear)
    assert type(model[0]) is not stand_in.Linear
    assert type(model[1]) is torch.nn.Linear
    assert model(torch.ones(2, 16)).shape == (2, 16)
    # Users and the checks are shown the library's class.
    assert class_path(model[0]) == class_path(stand_in.Linear(16, 16))


def test_a_conversion_that_stops_is_seen_and_so_is_an_optimizer_without_the_head(stand_in, monkeypatch):
    accelerate = pytest.importorskip("accelerate")
    from pytest_fp8.backends.accelerate import AccelerateTransformerEngine, forget_accelerate
    from pytest_fp8.worker.notes import untied, weights_of
    from pytest_fp8.worker.tensors import trained

    monkeypatch.setattr("accelerate.accelerator.is_transformer_engine_available", lambda: True)
    monkeypatch.setattr("accelerate.utils.transformer_engine.is_transformer_engine_available", lambda: True)
    forget_accelerate()
    accelerator = accelerate.Accelerator(cpu=True)
    model = blocks(10)
    optimizer = torch.optim.AdamW(model.parameters())
    before = weights_of(model)
    # Accelerate's own conversion and hand-over of parameters, without the autocast that needs the real library.
    monkeypatch.setattr(accelerator, "prepare", accelerator._prepare_te)
    prepared = AccelerateTransformerEngine().prepare_with(
        accelerator, model, optimizer, Case("1b", "accelerate_te", "delayed", compile=False)
    )
    live = [name for name, module in model.named_modules() if isinstance(module, stand_in.Linear)]
    assert prepared.conversion.converted == ["block.q", "block.k", "lm_head"]
    assert live == ["block.q", "lm_head"], "it stopped at the router: k stayed"
    assert untied(before, before) == {}
    assert untied(before, weights_of(model)) == {"lm_head.weight": "embed.weight"}
    assert "lm_head.weight" not in trained(model, prepared.optimizer)
    forget_accelerate()


def adapted():
    """A frozen Linear with adapters beside it, as peft names them, and a head."""
    from torch import nn

    base = nn.Linear(32, 32, bias=False).requires_grad_(False)
    adapters = {"base_layer": base, "lora_A": nn.Linear(32, 16, bias=False), "lora_B": nn.Linear(16, 32, bias=False)}
    return nn.ModuleDict({"q_proj": nn.ModuleDict(adapters)})


def test_on_unsloths_model_adapters_are_converted_and_the_base_is_unfrozen(stand_in, monkeypatch):
    accelerate = pytest.importorskip("accelerate")
    from pytest_fp8.backends import backend
    from pytest_fp8.backends.accelerate import forget_accelerate
    from pytest_fp8.backends.linears import linears
    from pytest_fp8.backends.unsloth import language_model_loss

    monkeypatch.setattr("accelerate.accelerator.is_transformer_engine_available", lambda: True)
    monkeypatch.setattr("accelerate.utils.transformer_engine.is_transformer_engine_available", lambda: True)
    monkeypatch.setattr("accelerate.utils.dataclasses.is_transformer_engine_available", lambda: True)
    # Accelerate's own conversion, without the autocast that needs the real library.
    monkeypatch.setattr(accelerate.Accelerator, "prepare", accelerate.Accelerator._prepare_te)
    case = Case("1b", "unsloth_te", "delayed", {"amax_compute_algo": "max"}, lora=16)
    model = adapted()
    prepared = backend("unsloth_te").prepare(model, lambda m: torch.optim.AdamW(m.parameters()), case)
    forget_accelerate()
    assert prepared.loss_of is language_model_loss
    assert set(prepared.conversion.skipped) == {"q_proj.lora_A", "q_proj.lora_B"}
    assert all(type(linear) is stand_in.Linear for linear in linears(model).values()), "adapters too"
    assert model["q_proj"]["base_layer"].weight.requires_grad, "what the layers question calls unfrozen"
