"""Checkpoints through a user's own save() and load(), in live arms on a CPU: sound ones pass."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torchao")

from controls import own_checkpoints as saved
from helpers.carried import CASE, carried, from_model, loss, through, with_model
from helpers.loops import batch, build
from pytest_fp8 import Case, Verdict, Workload
from pytest_fp8.codes import K

pytestmark = pytest.mark.slow


def adamw(parameters):
    import torch

    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    optimizer.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    return optimizer


def with_torch(model, optimizer, folder):
    import torch

    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "at": optimizer.scheduler.state_dict()},
        folder / "all.pt",
    )


def from_torch(model, optimizer, folder):
    import torch

    state = torch.load(folder / "all.pt", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    optimizer.scheduler.load_state_dict(state["at"])


def with_dcp(model, optimizer, folder):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, state = get_state_dict(model, optimizer)
    at = {"schedule": optimizer.scheduler.state_dict()}
    dcp.save({"model": weights, "optimizer": state, **at}, checkpoint_id=str(folder), no_dist=True)


def from_dcp(model, optimizer, folder):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    weights, state = get_state_dict(model, optimizer)
    held = {"model": weights, "optimizer": state, "schedule": optimizer.scheduler.state_dict()}
    dcp.load(held, checkpoint_id=str(folder), no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=held["model"], optim_state_dict=held["optimizer"])
    optimizer.scheduler.load_state_dict(held["schedule"])


@pytest.mark.parametrize(
    ("recipe", "save", "load"), [("tensorwise", with_torch, from_torch), ("rowwise", with_dcp, from_dcp)]
)
def test_sound_functions_pass(recipe, save, load):
    decision = carried(replace(CASE, recipe=recipe), loss=loss, optimizer=adamw, save=save, load=load)
    assert decision.verdict is Verdict.PASS, decision.message
    assert "fp8 -> bf16 (own, resumed), bf16 -> fp8 (own, resumed)" in decision.headline


def test_an_average_schedule_and_running_statistics_that_are_saved_pass():
    parts = {name: getattr(saved, name) for name in ("build", "batch", "loss", "optimizer", "save", "load")}
    decision = carried(**parts)
    assert decision.verdict is Verdict.PASS, decision.message


def test_save_pretrained_of_a_tied_llama_passes():
    def build_llama():
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=96, use_cache=False, tie_word_embeddings=True))

    def tokens(step):
        import torch

        ids = torch.randint(0, 96, (4, 16))
        return {"input_ids": ids, "labels": ids}

    def save(model, optimizer, folder):
        import torch

        model.save_pretrained(folder)
        torch.save(optimizer.state_dict(), folder / "optimizer.pt")

    def load(model, optimizer, folder):
        import torch

        read = type(model).from_pretrained(folder, dtype=torch.bfloat16)
        model.load_state_dict(read.state_dict())
        optimizer.load_state_dict(torch.load(folder / "optimizer.pt", weights_only=True))

    decision = carried(build=build_llama, batch=tokens, save=save, load=load)
    assert decision.verdict is Verdict.PASS, decision.message


def test_own_functions_are_asked_beside_the_other_stores():
    decision = carried(Case("own", "torchao", "tensorwise", emulated=True), loss=loss, save=with_model, load=from_model)
    assert {t["store"] for t in decision.numbers["transfers"]} == {"safetensors", "dcp", "own"}


def test_without_resuming_the_optimizer_is_not_asked_for():
    def weights_alone(model, optimizer, folder):
        import torch

        torch.save(model.state_dict(), folder / "w.pt")

    def from_weights(model, optimizer, folder):
        import torch

        model.load_state_dict(torch.load(folder / "w.pt", weights_only=True))

    case, parts = through("own", resume=False), {"loss": loss, "save": weights_alone, "load": from_weights}
    assert carried(case, **parts).verdict is Verdict.PASS
    assert carried(**parts).code is K.OPTIMIZER_LOST


def test_giving_them_changes_no_stored_hash():
    plain = Workload(build=build, batch=batch, loss=loss)
    assert replace(plain, save=with_model, load=from_model).fingerprint("x") == plain.fingerprint("x")
