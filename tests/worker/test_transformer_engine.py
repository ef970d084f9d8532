"""Transformer Engine on a CPU, where the library is a stand-in: activation checkpointing, and the fused decoder."""

from __future__ import annotations

import functools
import gc
import sys
from dataclasses import replace

import pytest
import torch
import torch._dynamo.testing
from torch import nn
from torch.utils.checkpoint import CheckpointError

from controls.products import RecomputeOutsideAutocast
from helpers import te_stand_in
from helpers.te_stand_in import Linear, RMSNorm
from pytest_fp8 import Case, Workload, recompute_with
from pytest_fp8.arms.spec import ArmSpec
from pytest_fp8.backends import backend
from pytest_fp8.backends.fused_llama import FusedAttention, NothingToFuse
from pytest_fp8.backends.transformer_engine import TransformerEngine
from pytest_fp8.codes import R
from pytest_fp8.plain import from_plain
from pytest_fp8.questions.layers.evidence import LayersEvidence
from pytest_fp8.worker.answers.layers import layers
from pytest_fp8.worker.checkpoint import roundtrip
from pytest_fp8.worker.curve import curve
from pytest_fp8.worker.error_trace import known_cause
from pytest_fp8.worker.run.engine import Engine, engine_type
from pytest_fp8.worker.server import ArmServer
from pytest_fp8.worker.tensors import digests
from pytest_fp8.worker.training.recompute import NothingRecomputes
from pytest_fp8.zoo import models
from pytest_fp8.zoo.shapes import SHAPES

pytestmark = pytest.mark.slow

CASE = Case("micro", "transformer_engine", "delayed", compile=False, activation_checkpointing=True)
SMALL = replace(SHAPES["micro"], tied=True)


@pytest.fixture(autouse=True)
def library():
    with te_stand_in.installed():
        yield
    # An engine freezes what is alive when it has warmed up.
    gc.unfreeze()


def manager():
    return sys.modules["transformer_engine.pytorch.quantization"].FP8GlobalStateManager


def spec(case=CASE, **more):
    return ArmSpec(case, "cpu", **more)


@pytest.fixture
def calls(monkeypatch):
    """Whether FP8 was on, for each call of a layer: in the forward pass, in the backward pass."""
    seen = {"forward": [], "backward": []}
    plain = te_stand_in.Linear.forward

    def forward(self, inp):
        going = "backward" if torch._C._current_graph_task_id() != -1 else "forward"
        seen[going].append(manager().is_fp8_enabled())
        return plain(self, inp)

    monkeypatch.setattr(te_stand_in.Linear, "forward", forward)
    return seen


@pytest.mark.parametrize(
    ("make", "inside"),
    [(Engine, True), (engine_type(RecomputeOutsideAutocast.path()), False)],
    ids=["sound", "control"],
)
def test_recomputation_runs_in_the_context_of_the_forward_pass(calls, make, inside):
    make(spec())
    assert len(calls["backward"]) == len(calls["forward"]) > 0
    assert all(calls["forward"])
    assert {*calls["backward"]} == {inside}


def own_step(model, batch, optimizer, precision):
    with precision():
        loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def llama():
    """A small Llama that recomputes by the library's function, as a user's own code has it."""
    import transformer_engine.pytorch as te

    model = models.build("micro", seed=0, device="cpu")
    model.gradient_checkpointing_enable()
    recompute_with(model, functools.partial(te.checkpoint, use_reentrant=False))
    return model


def tokens(step):
    given = torch.randint(0, 256, (2, 24))
    return {"input_ids": given, "labels": given}


OWN = replace(CASE, model="own", activation_checkpointing=False)


@pytest.mark.parametrize(("step", "question"), [(None, "layers"), (own_step, "logits")], ids=["declared", "own step"])
def test_a_forward_pass_without_a_backward_pass_leaves_nothing_queued(step, question):
    workload = Workload(build=llama, batch=tokens, step=step).ship() if step else None
    server = ArmServer(spec(OWN if step else CASE, workload=workload))
    [queue] = manager().quantization_state.fp8_tensors_recompute_buffer
    server.answer(question, {"seed": 0} if question == "logits" else {})
    assert not queue, "later recomputations would take the scales of the pass before"


def test_the_librarys_reentrant_checkpointing_is_seen(calls):
    def reentrant():
        import transformer_engine.pytorch as te

        model = llama()
        recompute_with(model, functools.partial(te.checkpoint, use_reentrant=True))
        return model

    workload = Workload(build=reentrant, batch=tokens, loss=lambda model, batch: model(**batch).loss)
    server = ArmServer(spec(OWN, workload=workload.ship()))
    evidence = from_plain(LayersEvidence, server.answer("layers", {}))
    assert sum("recompute" in call.owed for call in evidence.calls) == 14
    assert all("dgrad" in call.owed for call in evidence.calls if "recompute" in call.owed)


def test_torchs_own_checkpointing_is_explained(monkeypatch):
    plain = te_stand_in.Linear.forward
    # In FP8 the library saves more tensors than in BF16.
    monkeypatch.setattr(
        te_stand_in.Linear,
        "forward",
        lambda self, inp: plain(self, inp.sin() if manager().is_fp8_enabled() else inp),
    )
    monkeypatch.setattr(TransformerEngine, "recompute_function", lambda self: None)
    with pytest.raises(CheckpointError, match="different number of tensors") as error:
        Engine(spec())
    code, cause, next_step = known_cause(error.value)
    assert code is R.RECOMPUTED_OUTSIDE
    assert "outside te.autocast" in cause
    assert "te.checkpoint" in next_step
    assert manager().get_fp8_recipe() is None


def test_a_model_without_a_switch_for_recomputation_says_what_to_do():
    workload = Workload(build=lambda: torch.nn.Linear(32, 32), batch=lambda step: torch.randn(32, 32))
    with pytest.raises(NothingRecomputes, match="Linear has no gradient_checkpointing_enable") as error:
        Engine(
            spec(
                Case("own", "torchao", "tensorwise", emulated=True, activation_checkpointing=True),
                workload=workload.ship(),
            )
        )
    assert "in the model's own code" in error.value.fp8_next


# -- the decoder with fused projections beside the plain one -----------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def library_of_fused():
    with te_stand_in.installed(), pytest.MonkeyPatch.context() as patch:
        patch.setitem(SHAPES, "small", SMALL)
        yield


def plain(**config):
    """A small Llama in float32, projections with biases."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    made = models.llama_config(SMALL)
    made.update({"attention_bias": True, "mlp_bias": True, **config})
    model = LlamaForCausalLM._from_config(made, dtype=torch.float32).train()
    with torch.no_grad():
        # Fresh norms are all ones and biases all zero, which any norm and bias would pass for.
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return model


def prepared(model):
    case = Case("small", "te_fused", "current", compile=False)
    return backend("te_fused").prepare(model, lambda m: torch.optim.SGD(m.parameters()), case)


# -- the model --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "dtype", "apart"),
    [((2, 1), torch.float32, 1e-5), ((4, 2), torch.bfloat16, 3e-2)],
    ids=["2q1kv", "4q2kv"],
)
def test_a_fused_model_computes_what_the_plain_one_does(heads, dtype, apart):
    sizes = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1], "head_dim": 64 // heads[0]}
    one, fused = plain(**sizes).to(dtype), prepared(plain(**sizes).to(dtype)).model
    tokens = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(1))
    expected, seen = (model(input_ids=tokens).logits for model in (one, fused))
    torch.testing.assert_close(seen, expected, rtol=apart, atol=apart)


def test_every_linear_is_accounted_for_by_its_fused_name_and_size():
    done = prepared(plain())
    block = {"self_attn.qkv_proj": (64, 128), "self_attn.o_proj": (64, 64)}
    block |= {"mlp.gate_up_proj": (64, 384), "mlp.down_proj": (192, 64)}
    expected = {f"model.layers.{i}.{name}": sizes for i in (0, 1) for name, sizes in block.items()}
    assert done.conversion.layers == {**expected, "lm_head": (64, 256)}
    assert done.conversion.converted == list(expected)
    assert list(done.conversion.skipped) == ["lm_head"]
    assert sum(isinstance(module, RMSNorm) for module in done.model.modules()) == 2 * 2 + 1
    assert not any(type(module).__name__ == "LlamaRMSNorm" for module in done.model.modules())
    assert done.model.lm_head.weight is done.model.model.embed_tokens.weight
    assert not any(parameter.is_meta for parameter in done.model.parameters())


def test_a_fused_size_that_no_fp8_product_takes_is_skipped_with_the_reason():
    done = prepared(plain(head_dim=10))
    name = "model.layers.1.self_attn.qkv_proj"
    assert str(done.conversion.skipped[name]) == "size: out_features=40 is not a multiple of 16"
    assert done.conversion.layers[name] == (64, 40)
    assert not isinstance(done.model.get_submodule(name), Linear)


def test_adapters_and_other_models_are_refused_and_not_changed():
    class Adapted(nn.Linear):
        """As an adapter library_of_fused leaves a Linear."""

    model = plain()
    model.model.layers[1].mlp.up_proj = Adapted(64, 192)
    with pytest.raises(NothingToFuse, match=r"layers\.1\.mlp\.up_proj is no plain Linear") as error:
        prepared(model)
    assert "without adapters" in error.value.fp8_next
    assert not any(isinstance(module, FusedAttention) for module in model.modules())
    with pytest.raises(NothingToFuse, match="Sequential: no LlamaAttention"):
        prepared(nn.Sequential(nn.Linear(64, 64)))


# -- the arm ----------------------------------------------------------------------------------------------------------


def engine(name, recipe):
    return Engine(ArmSpec(Case("small", name, recipe, compile=False), "cpu", threads=2))


@pytest.fixture(scope="module")
def fused(library_of_fused):
    return engine("te_fused", "current")


@pytest.fixture(scope="module")
def reference(library_of_fused):
    return engine("bf16", "none")


def weights(arm):
    return roundtrip.weights_of(arm)[0]


def test_a_restart_brings_back_the_weights_of_the_seed(fused, reference):
    before = digests(weights(fused))
    for arm in (fused, reference):
        curve(arm, seed=5, steps=2)
        arm.restart(seed=3, jitter=True)
    assert digests(weights(fused)) == digests(weights(reference)) != before
    assert not fused.optimizer.state


@pytest.mark.parametrize(
    ("forth", "store", "optimizer"),
    [(True, "dcp", True), (False, "safetensors", False)],
)
def test_checkpoints_are_interchangeable(fused, reference, forth, store, optimizer, tmp_path):
    source, target = (fused, reference) if forth else (reference, fused)
    curve(source, seed=2, steps=3)
    saved = roundtrip.save(source, tmp_path, store, optimizer)
    assert "lm_head.weight" not in saved.digests, "stored once, under the embedding's name"
    assert not any("qkv" in key or "gate_up" in key for key in saved.digests)
    loaded = roundtrip.load(target, tmp_path, store, optimizer, seed=4)
    assert not loaded.refused, loaded
    assert loaded.digests == saved.digests == digests(weights(source))
    assert target.model.lm_head.weight is target.model.model.embed_tokens.weight
    if optimizer:
        assert len(saved.optimizer_digests) == 3 * len(saved.digests), "step and two moments of each plain weight"
        assert loaded.optimizer_digests == saved.optimizer_digests
        going_on = [curve(arm, seed=2, steps=3, first_step=3)["losses"] for arm in (source, target)]
        assert going_on[1] == pytest.approx(going_on[0], rel=2e-4)


def test_a_missing_part_is_refused(fused, tmp_path):
    from safetensors.torch import load_file, save_file

    roundtrip.save(fused, tmp_path, "safetensors", optimizer=False)
    lost = "model.layers.1.self_attn.k_proj.weight"
    kept = {name: value for name, value in load_file(tmp_path / "model.safetensors").items() if name != lost}
    save_file(kept, tmp_path / "model.safetensors")
    loaded = roundtrip.load(fused, tmp_path, "safetensors", optimizer=False, seed=4)
    assert "model.layers.1.self_attn.qkv_proj.weight" in loaded.refused


def test_every_product_of_a_step_belongs_to_a_layer(fused):
    evidence = from_plain(LayersEvidence, layers(fused))
    assert evidence.recipes["model.layers.0.self_attn.qkv_proj"] == {"recipe": "current", "fp8_format": "HYBRID"}
    assert sorted(evidence.live_fp8) == sorted(evidence.converted)
    step = evidence.step()
    assert {a.kind for a in step.attributions} == {"bfloat16"}
    assert len(step.attributions) == 3 * 9
    assert {product.operator for product in step.others} <= {"bmm"}, "the rotary embedding's"
