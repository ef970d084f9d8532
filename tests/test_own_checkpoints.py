"""Checkpoints through a user's own save() and load(), in live arms on a CPU: sound ones pass, mistakes are named."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torchao")

from controls import own_checkpoints as saved
from helpers.carried import CASE, carried, through
from helpers.loops import batch, build, loop
from pytest_fp8 import Case, Verdict, Workload
from pytest_fp8.errors import SettingsError
from pytest_fp8.worker.training.step import WorkloadError

pytestmark = pytest.mark.slow

BOTH = pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])


def loss(model, rows):
    return (model(rows) - rows.sin()).float().pow(2).mean()


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


def with_safetensors(model, optimizer, folder):
    import torch
    from safetensors.torch import save_file

    save_file(model.state_dict(), folder / "model.safetensors")
    torch.save([optimizer.state_dict(), optimizer.scheduler.last_epoch], folder / "rest.pt")


def from_safetensors(model, optimizer, folder):
    """The schedule is made anew at the stored step, as scripts do that keep nothing of it but the step."""
    import torch
    from safetensors.torch import load_file

    state, step = torch.load(folder / "rest.pt", weights_only=True)
    model.load_state_dict(load_file(folder / "model.safetensors"))
    optimizer.load_state_dict(state)
    optimizer.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20, last_epoch=step - 1)
    optimizer.load_state_dict(state)


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


@BOTH
@pytest.mark.parametrize(
    "functions",
    [(with_torch, from_torch), (with_safetensors, from_safetensors), (with_dcp, from_dcp)],
    ids=["torch.save", "safetensors", "dcp"],
)
def test_sound_functions_pass(recipe, functions):
    save, load = functions
    decision = carried(replace(CASE, recipe=recipe), loss=loss, optimizer=adamw, save=save, load=load)
    assert decision.verdict is Verdict.PASS, decision.message
    assert "fp8 -> bf16 (own, resumed), bf16 -> fp8 (own, resumed)" in decision.headline


@BOTH
def test_an_average_schedule_and_running_statistics_that_are_saved_pass(recipe):
    parts = {name: getattr(saved, name) for name in ("build", "batch", "loss", "optimizer", "save", "load")}
    decision = carried(replace(CASE, recipe=recipe), **parts)
    assert decision.verdict is Verdict.PASS, decision.message


@BOTH
def test_save_pretrained_of_a_tied_llama_passes(recipe):
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

    decision = carried(replace(CASE, recipe=recipe), build=build_llama, batch=tokens, save=save, load=load)
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
    assert "weights were loaded and the optimizer was not" in carried(**parts).message


def with_model(model, optimizer, folder):
    import torch

    torch.save([model.state_dict(), optimizer.state_dict()], folder / "x.pt")


def from_model(model, optimizer, folder):
    import torch

    weights, state = torch.load(folder / "x.pt", weights_only=True)
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)


# -- mistakes ---------------------------------------------------------------------------------------------------------


def nothing(model, optimizer, folder):
    """Loads nothing."""


def prefixed(model, optimizer, folder):
    import torch

    weights, state = torch.load(folder / "x.pt", weights_only=True)
    model.load_state_dict({f"module.{name}": value for name, value in weights.items()}, strict=False)
    optimizer.load_state_dict(state)


def halved_in_place(model, optimizer, folder):
    with_model(model, optimizer, folder)
    model.blocks[0].up.weight.data.copy_(model.blocks[0].up.weight.data / 3)


def rate_lost(model, optimizer, folder):
    import torch

    weights, state = torch.load(folder / "x.pt", weights_only=True)
    model.load_state_dict(weights)
    rates = [group["lr"] for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = 3 * rate


@pytest.mark.parametrize(
    ("save", "load", "says"),
    [
        (with_model, nothing, "load() loaded nothing"),
        (with_model, prefixed, "dropped by strict=False"),
        (halved_in_place, from_model, "saving changed the model itself"),
        (with_model, rate_lost, "group 0: lr 0.001 -> 0.003"),
    ],
)
def test_mistakes_are_named(save, load, says):
    decision = carried(loss=loss, save=save, load=load)
    assert decision.verdict is Verdict.FAIL, decision.message
    assert says in decision.message


def raising(model, optimizer, folder):
    raise KeyError("blocks.0.up.weight")


def pickling(model, optimizer, folder):
    import torch

    class Config:
        pass

    # As one that stands in a test file, and that an arm was given.
    Config.__qualname__ = "Config"
    torch.save({"config": Config()}, folder / "x.pt")


def assigning(model, optimizer, folder):
    import torch

    model.load_state_dict(torch.load(folder / "x.pt", weights_only=True)[0], assign=True)


@pytest.mark.parametrize(
    ("save", "load", "says"),
    [
        (raising, from_model, r"the workload's save, raising\(\), raised KeyError: 'blocks.0.up.weight'"),
        (with_model, raising, r"the workload's load, raising\(\), raised KeyError"),
    ],
)
def test_functions_that_cannot_work_are_one_error_that_names_them(save, load, says):
    with pytest.raises(WorkloadError, match=says) as error:
        carried(loss=loss, save=save, load=load)
    assert error.value.fp8_next


def test_a_known_error_in_them_has_its_own_cause():
    with pytest.raises(WorkloadError, match=r"the workload's save, pickling\(\), raised \w+") as error:
        carried(loss=loss, save=pickling, load=from_model)
    assert "without importing it" in error.value.fp8_cause
    assert "asdict" in error.value.fp8_next


def test_new_parameters_that_no_optimizer_holds_are_a_verdict():
    decision = carried(loss=loss, save=with_model, load=assigning)
    assert decision.verdict is Verdict.FAIL
    assert "the optimizer steps parameters that the model does not have" in decision.message
    assert "assign=True" in decision.message


def test_one_function_alone_is_refused():
    with pytest.raises(SettingsError, match="both save= and load="):
        Workload(build=build, batch=batch, save=with_model).ship("a test")


def test_own_functions_that_are_asked_for_and_not_given_are_named():
    with pytest.raises(WorkloadError, match="the workload has no save"):
        carried(through("own"), loss=loss)


def test_giving_them_changes_no_stored_hash():
    plain = Workload(build=build, batch=batch, loss=loss)
    assert replace(plain, save=with_model, load=from_model).fingerprint("x") == plain.fingerprint("x")


# -- what is said and fails nothing -----------------------------------------------------------------------------------


def build_dropping():
    import torch

    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 32))


def test_dropout_masks_of_a_resumed_run_are_mentioned():
    decision = carried(build=build_dropping, loss=loss, save=with_model, load=from_model)
    assert decision.verdict is Verdict.PASS, decision.message
    assert "the state of the random generators (torch) is not carried" in decision.headline


def test_a_random_state_that_is_carried_is_not_mentioned():
    def save(model, optimizer, folder):
        import torch

        with_model(model, optimizer, folder)
        torch.save(torch.get_rng_state(), folder / "random.pt")

    def load(model, optimizer, folder):
        import torch

        from_model(model, optimizer, folder)
        torch.set_rng_state(torch.load(folder / "random.pt", weights_only=True))

    decision = carried(build=build_dropping, loss=loss, save=save, load=load)
    assert "generators" not in decision.headline, decision.message


def test_a_value_that_the_optimizer_computes_anew_in_each_step_is_not_lost():
    def optimizer(parameters):
        import torch

        class Noting(torch.optim.AdamW):
            def step(self, closure=None):
                held = [p.grad for p in self.param_groups[0]["params"] if p.grad is not None]
                self.gradient_norm = torch.nn.utils.get_total_norm(held)
                return super().step(closure)

        return Noting(parameters, lr=1e-3)

    decision = carried(loss=loss, optimizer=optimizer, save=with_model, load=from_model)
    assert decision.verdict is Verdict.PASS, decision.message


def test_a_counter_that_decides_the_rate_and_is_lost_is_named():
    def optimizer(parameters):
        import torch

        class Counting(torch.optim.SGD):
            count = 0

            def step(self, closure=None):
                self.count += 1
                return super().step(closure)

        made = Counting(parameters, lr=1e-3)
        made.count = 0
        return made

    decision = carried(loss=loss, optimizer=optimizer, save=with_model, load=from_model)
    assert decision.verdict is Verdict.FAIL
    assert "count 4 -> 0" in decision.message
    through_ours = carried(through("dcp"), loss=loss, optimizer=optimizer)
    assert through_ours.verdict is Verdict.PASS, through_ours.message


def test_a_loop_that_draws_its_own_data_is_no_fault_of_the_checkpoint():
    def build_with_data():
        model = build()
        model.drawn = 0
        return model

    def step(model, rows, optimizer, precision):
        import torch

        model.drawn += 1
        generator = torch.Generator().manual_seed(model.drawn)
        scale = 0.01 * 1.2**model.drawn
        return loop()(model, scale * torch.randn(96, 32, generator=generator).to(rows.dtype), optimizer, precision)

    decision = carried(build=build_with_data, step=step, save=with_model, load=from_model)
    assert decision.verdict is Verdict.INVALID, decision.message
    assert "the resumed run was given other data" in decision.message
