"""Activation checkpointing with Transformer Engine, on a CPU: the library is a stand-in, torch's part is real."""

from __future__ import annotations

import functools
import gc
import sys
from dataclasses import replace

import pytest
import torch
import torch._dynamo.testing
from torch.utils.checkpoint import CheckpointError

from controls.products import RecomputeOutsideAutocast
from helpers import te_stand_in
from pytest_fp8 import Case, Workload, recompute_with
from pytest_fp8.arms.spec import ArmSpec
from pytest_fp8.backends.transformer_engine import TransformerEngine
from pytest_fp8.codes import R
from pytest_fp8.plain import from_plain
from pytest_fp8.questions.layers.evidence import LayersEvidence
from pytest_fp8.worker.error_trace import known_cause
from pytest_fp8.worker.run.engine import Engine, engine_type
from pytest_fp8.worker.server import ArmServer
from pytest_fp8.worker.training.recompute import NothingRecomputes
from pytest_fp8.zoo import models

pytestmark = pytest.mark.slow

CASE = Case("micro", "transformer_engine", "delayed", compile=False, activation_checkpointing=True)
LAYERS = 14


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
    assert sum("recompute" in call.owed for call in evidence.calls) == LAYERS
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
