"""Checkpoints of live arms on a CPU: what models, optimizers and users' functions may be, what is lost, and the files.

Others that are sound: ``python -m benchmarks.healthy``; other faults: ``suites/controls/checkpoints.py``."""

from __future__ import annotations

import pytest

pytest.importorskip("torchao")
import json
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch

from controls import checkpoints as saved
from helpers.evidence import StandIn, verdict_of
from helpers.nets import batch, build, by_torchao, loop, serve
from pytest_fp8 import Case, Verdict, Workload
from pytest_fp8.arms.spec import ArmSpec
from pytest_fp8.codes import K, R
from pytest_fp8.questions.checkpoints.carry import transfers_of
from pytest_fp8.questions.checkpoints.check import check_checkpoints
from pytest_fp8.worker import tensors as t
from pytest_fp8.worker.checkpoint import stores
from pytest_fp8.worker.checkpoint.state import StrayParameter, UnstorableStateError
from pytest_fp8.worker.server import ArmServer
from pytest_fp8.worker.tensors import digests
from pytest_fp8.worker.training.step import WorkloadError, output_of

pytestmark = pytest.mark.slow

STORES = ("safetensors", "dcp")
CASE = Case("own", "torchao", "tensorwise", emulated=True, name="carried", checkpoint_formats=("own",))


class LiveArm:
    """An arm that answers as through the pipe: plain data."""

    def __init__(self, case, shipped):
        self._server = ArmServer(ArmSpec(case, "cpu", shipped, threads=1))
        self.facts = json.loads(json.dumps(self._server.describe()))

    def request(self, operation, **arguments):
        answer = self._server.answer(operation, arguments)
        return answer if isinstance(answer, bytes) else json.loads(json.dumps(answer))


class LivePair(StandIn):
    def __init__(self, case, folder, workload):
        shipped = workload.ship("a test")
        super().__init__(case, LiveArm(case.reference(), shipped), LiveArm(case, shipped))
        self._folder = folder

    def folder(self, what):
        return self._folder


def carried(case=CASE, **parts):
    """The decision of the checkpoint question; ``parts`` are those of the :class:`Workload`."""
    workload = Workload(**{"build": build, "batch": batch, **parts})
    with tempfile.TemporaryDirectory() as folder:
        arms = LivePair(case, Path(folder), workload)
        return check_checkpoints(arms.run(lambda: transfers_of(arms)))


def through(*stores, **changes):
    """The case through these stores."""
    return replace(CASE, checkpoint_formats=stores, **changes)


def loss(model, rows):
    return (model(rows) - rows.sin()).float().pow(2).mean()


def with_model(model, optimizer, folder):
    torch.save([model.state_dict(), optimizer.state_dict()], folder / "x.pt")


def from_model(model, optimizer, folder):
    weights, state = torch.load(folder / "x.pt", weights_only=True)
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)


def two_linears(kind=torch.nn.Sequential):
    return kind(torch.nn.Linear(32, 64), torch.nn.SiLU(), torch.nn.Linear(64, 32))


# -- models -----------------------------------------------------------------------------------------------------------


class OldLoad(torch.nn.Sequential):
    """Written before torch's own method knew ``assign``, which torch.distributed.checkpoint.state_dict passes."""

    def load_state_dict(self, state_dict, strict=True):
        return super().load_state_dict(state_dict, strict)


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


# -- what is lost through our stores ----------------------------------------------------------------------------------


def refusing(*_, **__):
    raise RuntimeError("a custom key is missing")


class RefusingModel(torch.nn.Sequential):
    load_state_dict = refusing


class Forgets(Counting):
    """Its FP8 arm knows nothing of extra state."""

    get_extra_state, set_extra_state = torch.nn.Module.get_extra_state, torch.nn.Module.set_extra_state


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


TIED = {"build": llama, "batch": tokens, "loss": None, "save": pretrained, "load": from_pretrained}


def weights_alone(model, optimizer, folder):
    torch.save(model.state_dict(), folder / "w.pt")


def from_weights(model, optimizer, folder):
    model.load_state_dict(torch.load(folder / "w.pt", weights_only=True))


def halved_in_place(model, optimizer, folder):
    with_model(model, optimizer, folder)
    model.blocks[0].up.weight.data.copy_(model.blocks[0].up.weight.data / 3)


def rate_lost(model, optimizer, folder):
    rate = optimizer.param_groups[0]["lr"]
    from_model(model, optimizer, folder)
    optimizer.param_groups[0]["lr"] = 3 * rate


def assigning(model, optimizer, folder):
    model.load_state_dict(torch.load(folder / "x.pt", weights_only=True)[0], assign=True)


def raising(model, optimizer, folder):
    raise KeyError("blocks.0.up.weight")


def test_a_function_that_cannot_work_is_one_error_that_names_it():
    with pytest.raises(WorkloadError, match=r"the workload's load, raising\(\), raised KeyError: 'blocks.0") as error:
        carried(loss=loss, save=with_model, load=raising)
    assert error.value.fp8_next


# -- FP8 layers that keep a copy of their weight ----------------------------------------------------------------------


def caching(renewed_by):
    """``convert`` whose layers multiply by a kept copy of their weight."""

    from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args

    def keep(layer):
        kept = {}
        layer.drop = kept.clear
        if "backward" in renewed_by:
            layer.weight.register_hook(lambda gradient: kept.clear())
        if "load" in renewed_by:
            layer.register_load_state_dict_post_hook(lambda *_: kept.clear())

        def forward(x):
            weight = layer.weight
            if "version" in renewed_by and kept.get("version") != weight._version:
                kept.clear()
            copy = kept.setdefault("copy", weight.detach().clone())
            kept.setdefault("version", weight._version)
            weight = weight + (copy - weight).detach()
            product = matmul_with_hp_or_float8_args.apply
            return product(x, weight.t(), layer.linear_mm_config, layer.config) + layer.bias

        layer.forward = forward

    def keep_all(model):
        for layer in model.modules():
            if isinstance(layer, Float8Linear):
                keep(layer)

    return by_torchao(then=keep_all)


def renewing(model, optimizer, folder):
    saved.load(model, optimizer, folder)
    for layer in model.modules():
        if hasattr(layer, "drop"):
            layer.drop()


class OnlyTrains(torch.nn.Sequential):
    def forward(self, rows):
        assert self.training, "made for training"
        return super().forward(rows)


OWN = {name: getattr(saved, name) for name in ("build", "batch", "optimizer", "save", "load")}


# -- through the question -------------------------------------------------------------------------------------------

BOTH_WAYS = "fp8 -> bf16 (own, resumed), bf16 -> fp8 (own, resumed)"
NOT_EVALUATED = "FP8 copies of weights was not checked: no evaluation of the model: AssertionError"
SOUND = {
    # name: (case, parts of the workload, what the headline says)
    "old load": (through(*STORES), {"build": lambda: two_linears(OldLoad)}, ""),
    "counting": (through(*STORES), {"build": Counting}, ""),
    "in FP8": (through(*STORES), {"optimizer": lambda parameters: InFp8(parameters, lr=1e-3)}, ""),
    "nested": (through(*STORES), {"optimizer": lambda parameters: Nested(parameters, lr=1e-3)}, ""),
    "8 bit": (through(*STORES), {"optimizer": eight_bit, "build": of_4096}, ""),
    "no data": (through("safetensors"), {"build": NoData}, "left out: _extra_state (a dict that is not data alone)"),
    "a tied model": (replace(CASE, recipe="rowwise"), TIED, BOTH_WAYS),
    "without resuming": (through("own", resume=False), {"save": weights_alone, "load": from_weights}, ""),
    "a copy of this version": (through("safetensors"), {"convert": caching("version")}, ""),
    "a copy that the load renews": (
        through("safetensors", "own"),
        {**OWN, "convert": caching("backward"), "load": renewing},
        "",
    ),
    "no evaluation": (
        through("safetensors"),
        {"convert": caching("backward, load"), "build": lambda: two_linears(OnlyTrains)},
        NOT_EVALUATED,
    ),
}


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_way_passes(name):
    case, parts, says = SOUND[name]
    decision = carried(case, **{"loss": loss, **parts})
    assert decision.verdict is Verdict.PASS, decision.message
    assert says in decision.headline
    assert says or "left out" not in decision.headline


FORGETS = by_torchao(then=lambda model: setattr(model, "__class__", Forgets))
FAULTS = [
    # case, parts of the workload, code, what the message says; suites/controls/checkpoints.py has more of them.
    (through("dcp"), {"build": lambda: two_linears(RefusingModel)}, K.LOAD_REFUSED, "RuntimeError: a custom key is"),
    (through("safetensors"), {"build": Counting, "convert": FORGETS}, K.LOAD_REFUSED, "_extra_state"),
    (CASE, {"save": halved_in_place, "load": from_model}, K.CHANGED_BY_SAVING, ""),
    (CASE, {"save": with_model, "load": rate_lost}, K.STATE_LOST, ""),
    (CASE, {"save": with_model, "load": assigning}, K.STRAY_PARAMETERS, ""),
    (CASE, {"save": with_model, "load": from_model, "optimizer": Masters}, K.DOES_NOT_GO_ON, ""),
    # The user's own load is asked in place of load_state_dict().
    (through("own"), {**OWN, "convert": caching("backward")}, K.STALE_COPIES, "bf16 -> fp8"),
]


@pytest.mark.parametrize(("case", "parts", "code", "says"), FAULTS)
def test_a_fault_is_named(case, parts, code, says):
    verdict_of(carried(case, **{"loss": loss, **parts}), Verdict.FAIL, code, says)


# -- outputs, which two arms compare ----------------------------------------------------------------------------------

SMALL = torch.zeros(2)


class Nothing(torch.nn.Module):
    def forward(self, rows):
        self.kept = rows * 2


def test_the_output_is_that_of_the_first_call_that_trains_or_the_loss():
    model, nothing = torch.nn.Linear(2, 2), Nothing()

    def run():
        with torch.no_grad():
            model(SMALL)
        return model(SMALL + 1)

    assert torch.equal(output_of(model, run), model(SMALL + 1).detach())
    assert output_of(nothing, lambda: [nothing(SMALL), nothing.kept.sum() + 1][1]).item() == 1.0


# -- files, digests, and tensors on their way to the host --------------------------------------------------------------

TENSORS = {f"layers.{i}.weight": torch.arange(i, i + 64, dtype=torch.bfloat16).reshape(8, 8) for i in range(5)}


@pytest.mark.parametrize(("store", "dtype"), [("safetensors", "BF16"), ("dcp", "bfloat16")])
def test_tensors_and_what_is_none_come_back(tmp_path, store, dtype):
    given = {**TENSORS, "count": torch.tensor(3), "shared": TENSORS["layers.0.weight"][2:4]}
    stores.write(tmp_path, store, given, {"a": [1, None, torch.tensor(7)]})
    found, tree = stores.read(tmp_path, store, torch.device("cpu"))
    assert tree == {"a": [1, None, torch.tensor(7)]}
    assert {name: value.tolist() for name, value in found.items()} == {n: v.tolist() for n, v in given.items()}
    assert stores.dtypes_on_disk(tmp_path, store)["layers.3.weight"] == dtype


def test_containers_and_their_keys_come_back_as_they_were(tmp_path):
    given = {"a": [1, (2.5, None, "b")], "b": {3: 4}, "m": Counter({30: 1, 60: 2}), "type": torch.bfloat16}
    assert stores.data_of(given) == given
    stores.write(tmp_path, "dcp", {}, given)
    found = stores.read(tmp_path, "dcp", torch.device("cpu"))[1]
    assert found == given
    assert type(found["m"]) is Counter


def test_what_is_no_data_is_told_from_what_is():
    assert stores.data_of({"a": {1}, "b": [object()], "c": torch.nn.Parameter(torch.ones(1)), "d": [[1]]}) == {
        "d": [[1]]
    }
    assert dict(stores.leaves("x", {"a": [torch.float32, 2.5]})) == {"x.a[0]": torch.float32, "x.a[1]": 2.5}


def test_a_class_that_is_not_declared_safe_is_not_loaded(tmp_path):
    stores.write(tmp_path, "dcp", {}, {"a": [tmp_path]})
    with pytest.raises(Exception, match="Weights only load failed"):
        stores.read(tmp_path, "dcp", torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.complex128, torch.bfloat16], ids=str)
def test_digests_tell_values_signs_and_places_apart(dtype):
    value = (torch.tensor([1 + 2j, 3 + 4j]) if dtype.is_complex else torch.tensor([1.0, 3.0])).to(dtype)
    given = {"one": value, "same": value.conj().conj().clone(), "negated": -value, "turned": value.flip(0)}
    more = {"conjugate": value.conj()} if dtype.is_complex else {}
    found = digests(given | more)
    assert found["one"] == found["same"]
    assert len(set(found.values())) == 3 + len(more)


DTYPES = (torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int64, torch.bool, torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_goes_through_a_small_buffer_is_the_same_to_the_bit(dtype, monkeypatch):
    monkeypatch.setattr(t, "STAGE_BYTES", 64)
    plain = [(3 * torch.randn(shape)).to(dtype) for shape in ((), (0,), (1,), (3,), (64,), (5, 7), (3, 0, 2))]
    odd = [plain[5].t(), plain[0].expand(5), plain[4][::2], plain[4][1:]]
    given = {str(index): value for index, value in enumerate([*plain, *odd])}
    found = t.on_host(given, device="cpu")
    for name, value in given.items():
        assert found[name] is not value
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape)
        assert found[name].float().equal(value.float())
