"""Checkpoints of live arms on a CPU: what models, optimizers and users' functions may be, and what is lost."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torchao")

import torch

from controls import own_checkpoints as saved
from helpers.carried import CASE, carried, from_model, loss, through, with_model
from helpers.closures import closing, lbfgs
from helpers.loops import batch, build, loop, serve
from pytest_fp8 import Case, Verdict, Workload
from pytest_fp8.codes import K, R
from pytest_fp8.errors import SettingsError
from pytest_fp8.worker.checkpoint.state import StrayParameter, UnstorableStateError
from pytest_fp8.worker.training.step import WorkloadError

pytestmark = pytest.mark.slow

STORES = ("safetensors", "dcp")


def two_linears(kind=torch.nn.Sequential):
    return kind(torch.nn.Linear(32, 64), torch.nn.SiLU(), torch.nn.Linear(64, 32))


# -- models -----------------------------------------------------------------------------------------------------------


class OldLoad(torch.nn.Sequential):
    """Written before torch's own method knew ``assign``, which torch.distributed.checkpoint.state_dict passes."""

    def load_state_dict(self, state_dict, strict=True):
        return super().load_state_dict(state_dict, strict)


class Turned(torch.nn.Module):
    """Random numbers of its own that no checkpoint holds."""

    def __init__(self):
        super().__init__()
        self.register_buffer("rates", torch.randn(64), persistent=False)
        self.one, self.two = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)

    def forward(self, x):
        return self.two((self.one(x) * self.rates).sin())


class Counting(torch.nn.Module):
    """Computes with a count of its calls, which is in its extra state."""

    def __init__(self):
        super().__init__()
        self.inner, self.seen = two_linears(), 0

    def get_extra_state(self):
        return {"seen": self.seen}

    def set_extra_state(self, state):
        self.seen = state["seen"]

    def forward(self, x):
        self.seen += self.training
        return self.inner(x) * (1 + self.seen)


class NoData(Counting):
    """Its extra state is none that a file without pickles can hold, and nothing depends on it."""

    def get_extra_state(self):
        return {"seen": {self.seen}}

    def set_extra_state(self, state): ...

    def forward(self, x):
        return self.inner(x)


# -- optimizers -------------------------------------------------------------------------------------------------------


class InFp8(torch.optim.SGD):
    """Keeps its momentum in FP8, which a load casts to the dtype of the weights."""

    @torch.no_grad()
    def step(self, closure=None):
        for weight in self.param_groups[0]["params"]:
            state = self.state[weight]
            old = state.get("momentum", torch.zeros_like(weight))
            state["momentum"] = (0.9 * old.float() + weight.grad.float()).to(torch.float8_e4m3fn)
            weight.add_(state["momentum"].to(weight.dtype), alpha=-1e-3)


class Wide(torch.optim.SGD):
    """Keeps a sum in float32."""

    @torch.no_grad()
    def step(self, closure=None):
        for weight in self.param_groups[0]["params"]:
            wide = self.state[weight].setdefault("wide", torch.zeros(weight.shape))
            weight.add_(wide.add_(weight.grad / 3).to(weight.dtype), alpha=-1e-3)


class Nested(torch.optim.SGD):
    """Reads and writes a number and a nested dict."""

    @torch.no_grad()
    def step(self, closure=None):
        for weight in self.param_groups[0]["params"]:
            state = self.state[weight]
            if not state:
                state.update(q=torch.zeros_like(weight), scale=1.0, meta={"step": 0})
            state["q"].mul_(0.9).add_(weight.grad, alpha=state["scale"])
            state["meta"]["step"] += 1
            state["scale"] = 1 / (3 + state["meta"]["step"])
            weight.add_(state["q"].to(weight.dtype), alpha=-1e-2)


class OtherForm(torch.optim.Optimizer):
    """Two optimizers, with a ``state_dict()`` of another form than torch's."""

    def __init__(self, parameters):
        weights = list(parameters)
        super().__init__(weights, {})
        self.parts = [torch.optim.AdamW(weights[:2], lr=1e-3), torch.optim.SGD(weights[2:], lr=1e-3, momentum=0.9)]

    def step(self, closure=None):
        for part in self.parts:
            part.step()

    def state_dict(self):
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict):
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)


class TwoAsOne(torch.optim.Optimizer):
    """As the message about two optimizers says how."""

    def __init__(self, parameters):
        weights = list(parameters)
        self.one, self.two = torch.optim.AdamW(weights[:2]), torch.optim.SGD(weights[2:])
        super().__init__([*self.one.param_groups, *self.two.param_groups], {})
        self.share()

    def share(self):
        self.one.state = self.two.state = self.state
        self.one.param_groups, self.two.param_groups = self.param_groups[:1], self.param_groups[1:]

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.share()

    def step(self, closure=None):
        self.one.step()
        self.two.step()


class Masters(torch.optim.AdamW):
    """AdamW on float32 copies of the weights, as Apex and Megatron do it: its groups hold these copies alone."""

    def __init__(self, parameters):
        self.live = list(parameters)
        super().__init__([weight.detach().float().clone() for weight in self.live], lr=1e-3)

    def zero_grad(self, set_to_none=True):
        super().zero_grad(set_to_none)
        for weight in self.live:
            weight.grad = None

    @torch.no_grad()
    def step(self, closure=None):
        masters = self.param_groups[0]["params"]
        for master, weight in zip(masters, self.live, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
        super().step()
        for master, weight in zip(masters, self.live, strict=True):
            weight.copy_(master)


def eight_bit(parameters):
    optim = pytest.importorskip("torchao.optim")

    class Eager(optim.AdamW8bit):
        """Compiling its step takes longer than all else here."""

        @torch.no_grad()
        def step(self, closure=None):
            with torch.compiler.set_stance("force_eager"):
                return super().step(closure)

    return Eager(parameters, lr=1e-2, block_size=32)


def of_4096():
    """torchao keeps states of at least 4096 values in 8 bit."""
    return torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.ReLU(), torch.nn.Linear(128, 32))


@pytest.mark.parametrize(
    "parts",
    [
        {"build": lambda: two_linears(OldLoad)},
        {"build": Turned},
        {"build": Counting},
        {"optimizer": lambda parameters: InFp8(parameters, lr=1e-3)},
        {"optimizer": lambda parameters: Wide(parameters, lr=1e-3)},
        {"optimizer": lambda parameters: Nested(parameters, lr=1e-3)},
        {"optimizer": OtherForm},
        {"optimizer": TwoAsOne},
        {"optimizer": lbfgs, "step": closing(), "loss": None},
        {"optimizer": eight_bit, "build": of_4096},
    ],
    ids=["old load", "turned", "counting", "in FP8", "wide", "nested", "other form", "two as one", "lbfgs", "8 bit"],
)
def test_sound_ways_pass_through_both_stores(parts):
    decision = carried(through(*STORES), **{"build": build, "loss": loss, **parts})
    assert decision.verdict is Verdict.PASS, decision.message
    assert "left out" not in decision.headline


def test_extra_state_that_is_no_data_is_said_in_the_pass():
    decision = carried(through("safetensors"), build=NoData, loss=loss)
    assert decision.verdict is Verdict.PASS, decision.message
    assert "left out: _extra_state (a dict that is not data alone)" in decision.headline


def test_a_count_of_steps_stays_on_the_host_and_groups_come_back(tmp_path):
    one = serve(loss=loss, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3))
    one.curve(seed=1, steps=2)
    one.engine.optimizer.param_groups[0]["lr"] = 5e-4
    one.save(str(tmp_path), "dcp", optimizer=True)
    one.load(str(tmp_path), "dcp", optimizer=True, seed=2)
    optimizer = one.engine.optimizer
    assert optimizer.param_groups[0]["lr"] == 5e-4
    assert {state["step"].device.type for state in optimizer.state.values()} == {"cpu"}


# -- what is lost through our stores ----------------------------------------------------------------------------------


def refusing(*_, **__):
    raise RuntimeError("a custom key is missing")


class RefusingModel(torch.nn.Sequential):
    load_state_dict = refusing


class RefusingOptimizer(torch.optim.AdamW):
    load_state_dict = refusing


class Dropping(torch.nn.Sequential):
    def load_state_dict(self, state_dict, *_, **__):
        return super().load_state_dict({k: v for k, v in state_dict.items() if k != "2.bias"}, strict=False)


class Forgets(Counting):
    """Its FP8 arm knows nothing of extra state."""

    get_extra_state, set_extra_state = torch.nn.Module.get_extra_state, torch.nn.Module.set_extra_state


def forgetting(model):
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model = convert_to_float8_training(model, config=Float8LinearConfig(emulate=True))
    model.__class__ = Forgets
    return model


@pytest.mark.parametrize(
    ("store", "parts", "code", "says"),
    [
        ("dcp", {"build": lambda: two_linears(RefusingModel)}, K.LOAD_REFUSED, "RuntimeError: a custom key is missing"),
        ("dcp", {"optimizer": RefusingOptimizer}, K.LOAD_REFUSED, "RuntimeError: a custom key is missing"),
        ("safetensors", {"build": Counting, "convert": forgetting}, K.LOAD_REFUSED, "_extra_state"),
        # Both arms start from one seed, and this optimizer moves nothing.
        (
            "safetensors",
            {"build": lambda: two_linears(Dropping), "optimizer": lambda p: torch.optim.SGD(p, lr=0.0)},
            K.WEIGHTS_MISSING,
            "2.bias",
        ),
    ],
    ids=["the model refuses", "the optimizer refuses", "a key without a place", "a weight dropped"],
)
def test_what_is_lost_fails_with_its_words(store, parts, code, says):
    decision = carried(through(store), **{"build": build, "loss": loss, **parts})
    assert (decision.verdict, decision.code) == (Verdict.FAIL, code), decision.message
    assert says in decision.message


class Keeping(Nested):
    def step(self, closure=None):
        super().step()
        for state in self.state.values():
            state["what"] = object()


def test_state_that_no_store_holds_is_named_before_anything_is_written(tmp_path):
    server = serve(optimizer=lambda parameters: Keeping(parameters, lr=1e-3), step=loop())
    with pytest.raises(UnstorableStateError, match=r"optimizer/enter\.weight/what is a builtins\.object") as error:
        server.save(str(tmp_path / "store"), "dcp", optimizer=True)
    assert "resume=False" in error.value.fp8_next
    assert not (tmp_path / "store").exists()
    with pytest.raises(StrayParameter, match="10 parameters") as error:
        carried(through("dcp"), loss=loss, optimizer=Masters)
    assert error.value.fp8_code is R.STRAY_PARAMETER


# -- through the user's own functions ---------------------------------------------------------------------------------


def adamw(parameters):
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    optimizer.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    return optimizer


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


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=96, use_cache=False, tie_word_embeddings=True))


def tokens(step):
    ids = torch.randint(0, 96, (4, 16))
    return {"input_ids": ids, "labels": ids}


def pretrained(model, optimizer, folder):
    model.save_pretrained(folder)
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")


def from_pretrained(model, optimizer, folder):
    read = type(model).from_pretrained(folder, dtype=torch.bfloat16)
    model.load_state_dict(read.state_dict())
    optimizer.load_state_dict(torch.load(folder / "optimizer.pt", weights_only=True))


AVERAGED = {name: getattr(saved, name) for name in ("build", "batch", "loss", "optimizer", "save", "load")}
TIED = {"build": llama, "batch": tokens, "loss": None, "save": pretrained, "load": from_pretrained}


@pytest.mark.parametrize(
    ("recipe", "parts"),
    [
        ("rowwise", {"optimizer": adamw, "save": with_dcp, "load": from_dcp}),
        ("tensorwise", AVERAGED),
        ("rowwise", TIED),
    ],
    ids=["DCP with a schedule", "averages, a schedule and running statistics", "save_pretrained of a tied model"],
)
def test_sound_functions_pass(recipe, parts):
    decision = carried(replace(CASE, recipe=recipe), **{"loss": loss, **parts})
    assert decision.verdict is Verdict.PASS, decision.message
    assert "fp8 -> bf16 (own, resumed), bf16 -> fp8 (own, resumed)" in decision.headline


def with_masters(model, optimizer, folder):
    torch.save([model.state_dict(), optimizer.state_dict(), optimizer.param_groups[0]["params"]], folder / "x.pt")


def from_masters(model, optimizer, folder):
    weights, state, masters = torch.load(folder / "x.pt", weights_only=True)
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    with torch.no_grad():
        for mine, stored in zip(optimizer.param_groups[0]["params"], masters, strict=True):
            mine.copy_(stored)


def test_master_copies_travel_through_own_functions_alone():
    case = Case("own", "torchao", "tensorwise", emulated=True)
    decision = carried(case, loss=loss, optimizer=Masters, save=with_masters, load=from_masters)
    assert decision.verdict is Verdict.PASS, decision.message
    assert {t["store"] for t in decision.numbers["transfers"]} == {*STORES, "own"}, "asked beside the other stores"
    assert "fp8 -> bf16 (dcp), fp8 -> bf16 (own, resumed)" in decision.headline, "through dcp the weights alone"
    assert "10 parameters of the optimizer are none of the model's" in decision.headline


def weights_alone(model, optimizer, folder):
    torch.save(model.state_dict(), folder / "w.pt")


def from_weights(model, optimizer, folder):
    model.load_state_dict(torch.load(folder / "w.pt", weights_only=True))


def test_without_resuming_the_optimizer_is_not_asked_for():
    parts = {"loss": loss, "save": weights_alone, "load": from_weights}
    assert carried(through("own", resume=False), **parts).verdict is Verdict.PASS
    assert carried(**parts).code is K.OPTIMIZER_LOST


def halved_in_place(model, optimizer, folder):
    with_model(model, optimizer, folder)
    model.blocks[0].up.weight.data.copy_(model.blocks[0].up.weight.data / 3)


def rate_lost(model, optimizer, folder):
    rate = optimizer.param_groups[0]["lr"]
    from_model(model, optimizer, folder)
    optimizer.param_groups[0]["lr"] = 3 * rate


def assigning(model, optimizer, folder):
    model.load_state_dict(torch.load(folder / "x.pt", weights_only=True)[0], assign=True)


@pytest.mark.parametrize(
    ("parts", "code"),
    [
        ({"save": halved_in_place, "load": from_model}, K.CHANGED_BY_SAVING),
        ({"save": with_model, "load": rate_lost}, K.GROUPS_LOST),
        ({"save": with_model, "load": assigning}, K.STRAY_PARAMETERS),
        ({"save": with_model, "load": from_model, "optimizer": Masters}, K.DOES_NOT_GO_ON),
    ],
    ids=lambda value: getattr(value, "slug", ""),
)
def test_mistakes_are_named(parts, code):
    """The controls of ``suites/controls/checkpoints.py`` are more of them."""
    decision = carried(loss=loss, **parts)
    assert (decision.verdict, decision.code) == (Verdict.FAIL, code), decision.message


def raising(model, optimizer, folder):
    raise KeyError("blocks.0.up.weight")


def pickling(model, optimizer, folder):
    class Config:
        pass

    # As one that stands in a test file, and that an arm was given.
    Config.__qualname__ = "Config"
    torch.save({"config": Config()}, folder / "x.pt")


@pytest.mark.parametrize(
    ("save", "load", "says", "cause"),
    [
        (with_model, raising, r"the workload's load, raising\(\), raised KeyError: 'blocks.0.up.weight'", ""),
        (pickling, from_model, r"the workload's save, pickling\(\), raised \w+", "without importing it"),
    ],
)
def test_functions_that_cannot_work_are_one_error_that_names_them(save, load, says, cause):
    with pytest.raises(WorkloadError, match=says) as error:
        carried(loss=loss, save=save, load=load)
    assert error.value.fp8_next
    assert cause in error.value.fp8_cause


def test_functions_that_are_not_given_or_that_change_no_hash():
    plain = Workload(build=build, batch=batch, loss=loss)
    with pytest.raises(SettingsError, match="both save= and load="):
        replace(plain, save=with_model).ship("a test")
    with pytest.raises(WorkloadError, match="the workload has no save"):
        carried(through("own"), loss=loss)
    assert replace(plain, save=with_model, load=from_model).fingerprint("x") == plain.fingerprint("x")
