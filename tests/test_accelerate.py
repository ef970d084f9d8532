"""FP8 through Accelerate and the Trainer: options in the environment, conversions that stop, ties and optimizers."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from helpers.evidence import curves, layers_evidence, loaded, saved
from pytest_fp8 import Case, Verdict
from pytest_fp8.questions.checkpoints.check import check_checkpoints
from pytest_fp8.questions.checkpoints.evidence import Transfer
from pytest_fp8.questions.layers.check import check_layers
from pytest_fp8.questions.loss.check import check_loss
from pytest_fp8.questions.loss.evidence import LossEvidence

torch = pytest.importorskip("torch")
DEFAULT = Case("1b", "accelerate_te", "delayed")


def blocks(odd=32):
    """An embedding tied to a head, and a block whose middle Linear may be of odd size."""
    from torch import nn

    block = nn.ModuleDict({"q": nn.Linear(32, 32), "router": nn.Linear(32, odd), "k": nn.Linear(32, 32)})
    model = nn.ModuleDict({"embed": nn.Embedding(64, 32), "block": block, "lm_head": nn.Linear(32, 64, bias=False)})
    model["lm_head"].weight = model["embed"].weight
    return model


def test_what_accelerate_is_meant_to_convert_with_each_library():
    from pytest_fp8.backends.accelerate import plan_for_te, plan_for_torchao

    te, ao = plan_for_te(blocks(10)), plan_for_torchao(blocks(10))
    assert te.converted == ["block.q", "block.k", "lm_head"]
    assert te.skipped["block.router"].startswith("size: out_features=10")
    assert ao.converted == ["block.k"]
    assert ao.skipped["block.q"].startswith("edge: Accelerate leaves the model's first")
    assert ao.skipped["lm_head"].startswith("head")


def test_a_tie_that_a_conversion_breaks_is_seen():
    from pytest_fp8.backends.linears import broken_ties, ties

    model = blocks()
    tied = ties(model)
    assert tied == {"lm_head.weight": "embed.weight"}
    assert broken_ties(tied, model) == {}
    model["lm_head"].weight = torch.nn.Parameter(model["embed"].weight.detach().clone())
    assert broken_ties(tied, model) == tied


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


def test_the_environment_is_put_back(monkeypatch):
    from pytest_fp8.backends.trainer import accelerate_environment

    monkeypatch.setenv("ACCELERATE_FP8_MARGIN", "7")
    before = dict(os.environ)
    with accelerate_environment({"ACCELERATE_MIXED_PRECISION": "fp8"}):
        assert "ACCELERATE_FP8_MARGIN" not in os.environ
    assert dict(os.environ) == before


def test_a_default_that_accelerate_drops_is_named_with_its_reason():
    seen = {"recipe": "delayed", **DEFAULT.full_options, "amax_compute_algo": "max"}
    decision = check_layers(DEFAULT, layers_evidence(case=DEFAULT, recipes={"q": seen, "up": seen}))
    assert decision.verdict is Verdict.FAIL
    assert "amax_compute_algo=most_recent" in decision.message
    assert "to_kwargs()" in decision.message
    asked = replace(DEFAULT, options={"amax_compute_algo": "max"})
    assert check_layers(asked, layers_evidence(case=asked)).verdict is Verdict.PASS


def test_a_conversion_that_stops_is_named_with_the_layer_it_stopped_at():
    sizes = {"mlp.gate": (64, 64), "mlp.router": (64, 10), "mlp.up": (64, 256)}
    evidence = layers_evidence(
        originals=sizes,
        converted=["mlp.gate", "mlp.up"],
        skipped={"mlp.router": "size: out_features=10 is not a multiple of 16"},
        live_fp8=["mlp.gate"],
    )
    decision = check_layers(DEFAULT, evidence)
    assert decision.verdict is Verdict.FAIL
    assert "stopped early, at mlp.router" in decision.message
    assert "not FP8: mlp.up" in decision.message


def test_weights_that_no_optimizer_steps_fail_the_loss():
    reference = {s: replace(c, trained=["a", "b"]) for s, c in curves().items()}
    whole = {s: replace(c, trained=["a", "b"]) for s, c in curves(0.001).items()}
    part = {s: replace(c, trained=["a"]) for s, c in curves(0.001).items()}
    twin = curves(0.0005)
    assert check_loss(LossEvidence(whole, reference, twin)).verdict is Verdict.PASS
    decision = check_loss(LossEvidence(part, reference, twin))
    assert decision.verdict is Verdict.FAIL
    assert "never stepped: b" in decision.message


def transfer(digests=None):
    source = saved(keys=["e", "h"], digests={"e": 1, "h": 2}, untied={"h": "e"})
    return Transfer("fp8 -> bf16", "safetensors", source, loaded(digests=digests or {"e": 1}), 0.0, 0.1)


def test_a_head_that_was_untied_fails_the_checkpoint_by_name():
    decision = check_checkpoints([transfer()])
    assert decision.verdict is Verdict.FAIL
    assert "h to stay one with e" in decision.message
    assert "untied" in decision.message
    assert check_checkpoints([transfer(digests={"e": 1, "h": 2})]).verdict is Verdict.PASS


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
    from pytest_fp8.worker.layers import class_path

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
    from pytest_fp8.backends.accelerate import AccelerateTransformerEngine
    from pytest_fp8.backends.accelerate_state import forget_accelerate
    from pytest_fp8.worker.fused_params import trained

    monkeypatch.setattr("accelerate.accelerator.is_transformer_engine_available", lambda: True)
    monkeypatch.setattr("accelerate.utils.transformer_engine.is_transformer_engine_available", lambda: True)
    forget_accelerate()
    accelerator = accelerate.Accelerator(cpu=True)
    model = blocks(10)
    optimizer = torch.optim.AdamW(model.parameters())
    # Accelerate's own conversion and hand-over of parameters, without the autocast that needs the real library.
    monkeypatch.setattr(accelerator, "prepare", accelerator._prepare_te)
    prepared = AccelerateTransformerEngine().prepare_with(accelerator, model, optimizer, compiled=False)
    live = [name for name, module in model.named_modules() if isinstance(module, stand_in.Linear)]
    assert prepared.conversion.converted == ["block.q", "block.k", "lm_head"]
    assert live == ["block.q", "lm_head"], "it stopped at the router: k stayed"
    assert prepared.conversion.untied == {"lm_head.weight": "embed.weight"}
    assert "lm_head.weight" not in trained(model, prepared.optimizer, {})
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
    from pytest_fp8.backends.accelerate_state import forget_accelerate
    from pytest_fp8.backends.linears import linears
    from pytest_fp8.backends.unsloth import language_model_loss

    monkeypatch.setattr("accelerate.accelerator.is_transformer_engine_available", lambda: True)
    monkeypatch.setattr("accelerate.utils.transformer_engine.is_transformer_engine_available", lambda: True)
    monkeypatch.setattr("accelerate.utils.dataclasses.is_transformer_engine_available", lambda: True)
    # Accelerate's own conversion, without the autocast that needs the real library.
    monkeypatch.setattr(accelerate.Accelerator, "prepare", accelerate.Accelerator._prepare_te)
    case = Case("1b", "unsloth_te", "delayed", {"amax_compute_algo": "max"}, lora=16)
    model = adapted()
    prepared = backend("unsloth_te").prepare(model, lambda m: torch.optim.AdamW(m.parameters()), case, compiled=True)
    forget_accelerate()
    assert prepared.loss_of is language_model_loss
    assert set(prepared.conversion.skipped) == {"q_proj.lora_A", "q_proj.lora_B"}
    assert all(type(linear) is stand_in.Linear for linear in linears(model).values()), "adapters too"
    assert model["q_proj"]["base_layer"].weight.requires_grad, "what the layers question calls unfrozen"


def test_unsloth_with_transformer_engine_needs_all_three(monkeypatch):
    from pytest_fp8.backends import base
    from pytest_fp8.backends.unsloth_te import UnslothTransformerEngine

    there = {"unsloth", "transformer-engine", "accelerate"}

    def asked(distribution, minimum):
        return distribution in there, distribution if distribution in there else f"no {distribution}"

    monkeypatch.setattr(base, "installed", asked)
    monkeypatch.setattr("pytest_fp8.backends.accelerate.installed", asked)
    assert UnslothTransformerEngine().available()[0]
    for missing in sorted(there):
        there.remove(missing)
        assert UnslothTransformerEngine().available() == (False, f"no {missing}")
        there.add(missing)


def test_an_unfrozen_head_is_seen_under_its_own_name():
    from pytest_fp8.worker.fused_params import trainable

    model = blocks().requires_grad_(False)
    assert trainable(model)["lm_head.weight"] is trainable(model)["embed.weight"] is False
    model["lm_head"].weight = torch.nn.Parameter(model["embed"].weight.detach().clone())
    assert trainable(model)["lm_head.weight"] is True
    assert trainable(model)["embed.weight"] is False


def test_converted_adapters_fail_with_unfrozen_weights_and_advice_for_the_library():
    names = {"q": (32, 32), "q.lora_A": (32, 16)}
    evidence = layers_evidence(
        originals=names,
        converted=["q"],
        skipped={"q.lora_A": "adapter: LoRA"},
        live_fp8=list(names),
        unfrozen=["q.weight"],
    )
    decision = check_layers(DEFAULT, evidence)
    assert "was an adapter" in decision.message
    assert "take gradients: q.weight" in decision.message
    assert "module_filter_fn" not in decision.message
    assert "module_filter_fn" in check_layers(Case("1b", "torchao", "tensorwise"), evidence).message


def test_an_update_does_not_ask_what_is_known_to_fail():
    """`-m hugging_face` with an update must not refuse 1b-accelerate.te for the known defect of its head."""
    import ast
    from pathlib import Path

    tree = ast.parse((Path(__file__).parent.parent / "suites" / "test_defects.py").read_text())
    for node in tree.body:
        functions = [node] if isinstance(node, ast.FunctionDef) else getattr(node, "body", [])
        pairs = [f for f in functions if isinstance(f, ast.FunctionDef) and "fp8_pair" in {a.arg for a in f.args.args}]
        if pairs and isinstance(node, ast.FunctionDef | ast.ClassDef):
            assert any("healthy_alone" in ast.unparse(d) for d in node.decorator_list), node.name
