"""Other libraries in an arm, on a CPU: Accelerate, transformers' Trainer, peft, and the suite's own models."""

from __future__ import annotations

import contextlib
import sys
import types
from collections import Counter

import pytest

pytest.importorskip("torchao")
pytest.importorskip("accelerate")
pytest.importorskip("peft")

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from helpers import te_stand_in
from helpers.loops import build, judge_both
from pytest_fp8 import Case, SettingsError, Verdict, Workload
from pytest_fp8.arms.spec import ArmSpec
from pytest_fp8.backends import backend
from pytest_fp8.backends.accelerate import (
    AccelerateTorchAO,
    AccelerateTransformerEngine,
    keep_out_of_compiled_code,
)
from pytest_fp8.backends.linears import reason_to_skip
from pytest_fp8.backends.trainer import by_trainer, fp8_environment
from pytest_fp8.plain import from_plain
from pytest_fp8.questions.layers.check import check_layers
from pytest_fp8.questions.layers.evidence import LayersEvidence
from pytest_fp8.questions.layers.products import role_table
from pytest_fp8.recipes import Stays
from pytest_fp8.said import WorkloadError
from pytest_fp8.worker.answers.layers import class_path
from pytest_fp8.worker.notes import weights_of
from pytest_fp8.worker.server import ArmServer
from pytest_fp8.worker.training.setup import TrainingSetup
from pytest_fp8.zoo import data, models, training
from pytest_fp8.zoo.shapes import SHAPES

pytestmark = pytest.mark.slow

# -- Accelerate -------------------------------------------------------------------------------------------------------


def blocks(odd=32):
    """An embedding tied to a head, and a block whose middle Linear may be of odd size."""
    block = nn.ModuleDict({"q": nn.Linear(32, 32), "router": nn.Linear(32, odd), "k": nn.Linear(32, 32)})
    model = nn.ModuleDict({"embed": nn.Embedding(64, 32), "block": block, "lm_head": nn.Linear(32, 64, bias=False)})
    model["lm_head"].weight = model["embed"].weight
    return model


def test_what_accelerate_is_meant_to_convert_with_each_library():
    te, ao = (kind().planned(blocks(10), None) for kind in (AccelerateTransformerEngine, AccelerateTorchAO))
    assert te.converted == ["block.q", "block.k", "lm_head"]
    assert te.skipped["block.router"].text.startswith("out_features=10")
    assert ao.converted == ["block.k"]
    assert (ao.skipped["block.q"].kind, ao.skipped["lm_head"].kind) == (Stays.EDGE, Stays.HEAD)


def test_every_option_of_the_recipe_is_in_the_environment():
    options = Case("1b", "trainer_te", "delayed", {"margin": 2, "amax_compute_algo": "max"}).full_options
    assert fp8_environment("TE", options) == {
        "ACCELERATE_MIXED_PRECISION": "fp8",
        "ACCELERATE_FP8_BACKEND": "TE",
        "ACCELERATE_FP8_FORMAT": "HYBRID",
        "ACCELERATE_FP8_AMAX_HISTORY_LEN": "1024",
        "ACCELERATE_FP8_AMAX_COMPUTE_ALGO": "max",
        "ACCELERATE_FP8_MARGIN": "2",
    }


def test_live_layers_get_one_class_that_is_not_compiled():
    with te_stand_in.installed():
        kind = te_stand_in.Linear
        model = nn.Sequential(kind(16, 16, device="cpu"), nn.Linear(16, 16), kind(16, 16, device="cpu"))
        keep_out_of_compiled_code(model)
        assert type(model[0]) is type(model[2]) is not kind
        assert isinstance(model[0], kind)
        assert type(model[1]) is nn.Linear
        assert model(torch.ones(2, 16)).shape == (2, 16)
        # Users and the checks are shown the library's class.
        assert class_path(model[0]) == class_path(kind(16, 16, device="cpu"))


# -- transformers' Trainer --------------------------------------------------------------------------------------------

TRAINED = Case("own", "trainer_torchao", "tensorwise", {"fp8_all_gather": False}, emulated=True, name="trained")
WIDTH, BATCH, ACCUMULATED, STEPS = 32, 16, 2, 3
ROWS = torch.randn(STEPS * ACCUMULATED * BATCH, WIDTH, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.inner, self.leave = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x, labels=None):
        return {"loss": (self.leave(self.inner(self.enter(x)).relu()) - x.sin()).float().square().mean()}


class Doubled(Trainer):
    """A Trainer of one's own, with another loss and the rows in their order."""

    def compute_loss(self, model, inputs, **given):
        return 2 * super().compute_loss(model, inputs, **given)

    def _get_train_sampler(self, *_):
        return torch.utils.data.SequentialSampler(self.train_dataset)


def make_trainer(folder):
    def trainer(model):
        arguments = TrainingArguments(
            output_dir=str(folder),
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            max_grad_norm=0.1,
            num_train_epochs=1,
            per_device_train_batch_size=BATCH,
            gradient_accumulation_steps=ACCUMULATED,
        )
        return Doubled(model, arguments, train_dataset=[{"x": row} for row in ROWS])

    return trainer


def seeded():
    torch.manual_seed(5)
    return Net()


def by(trainer):
    case = TRAINED.reference()
    return by_trainer(Workload(seeded, trainer=trainer), backend(case.backend), case, torch.device("cpu"))


def test_an_arms_steps_are_those_of_train_and_its_batches_are_drawn_anew(tmp_path):
    own = by(make_trainer(tmp_path))
    model = own.build()
    optimizer = own.optimizer(model)
    parts = [{"x": part} for part in ROWS.split(BATCH)]
    for step in range(STEPS):
        own.step(model, parts[step * ACCUMULATED : (step + 1) * ACCUMULATED], optimizer, torch.enable_grad)
    plain = make_trainer(tmp_path)(seeded())
    plain.train()
    for name, weight in plain.model.named_parameters():
        assert torch.equal(weight, model.get_parameter(name)), name
    torch.manual_seed(1)
    first, second = own.batch(0), own.batch(1)
    torch.manual_seed(1)
    assert [part["x"].shape for part in first] == [(BATCH, WIDTH)] * ACCUMULATED
    assert all(torch.equal(one["x"], again["x"]) for one, again in zip(first, own.batch(0), strict=True))
    assert not torch.equal(first[0]["x"], second[0]["x"])


def test_the_trainers_own_model_is_converted(tmp_path, monkeypatch):
    # What the session's own environment says of FP8 is not the arms'.
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    decision = judge_both(TRAINED, build=Net, batch=None, trainer=make_trainer(tmp_path))
    assert decision.verdict is Verdict.PASS, decision.message
    # Accelerate leaves the first and the last Linear.
    assert (decision.figures.converted, decision.figures.linears) == (1, 3)
    assert decision.figures.roles["wgrad"] == {"expected": ACCUMULATED, "fp8": ACCUMULATED}


def test_what_is_no_trainer_is_told_and_without_one_a_batch_is_needed():
    with pytest.raises(WorkloadError, match="must give a Trainer of transformers, it gave NoneType"):
        by(lambda model: None).build()
    with pytest.raises(SettingsError, match="batch"):
        Workload(Net)


# -- adapters ---------------------------------------------------------------------------------------------------------

LORA = Case("micro", "torchao", "tensorwise", lora=8, emulated=True)
BASE = SHAPES["micro"].layers * 7
FIRST = 3
"""The Linears that take the embedding's output, which needs no gradient where the embedding is frozen."""


def adapter(name):
    return ".lora_A." in name or ".lora_B." in name


def test_the_base_is_converted_and_each_adapter_stays_with_its_reason():
    evidence = from_plain(LayersEvidence, ArmServer(ArmSpec(LORA, "cpu", None, threads=1)).layers())
    assert check_layers(LORA, evidence).verdict is Verdict.PASS
    assert len(evidence.live_fp8) == BASE
    assert all(name.endswith(".base_layer") for name in evidence.live_fp8)
    left = [name for name in evidence.skipped if adapter(name)]
    assert len(left) == 2 * BASE
    assert {str(evidence.skipped[name]) for name in left} == {"adapter: LoRA matrices stay in high precision"}
    step = evidence.step()
    ran = Counter((a.role, a.kind) for a in step.attributions if adapter(a.layer))
    owed = {"fprop": 2 * BASE, "dgrad": 2 * BASE - FIRST, "wgrad": 2 * BASE}
    assert ran == {(role, "bfloat16"): count for role, count in owed.items()}
    assert not any("wgrad" in call.owed for call in evidence.calls if not adapter(call.name))
    assert "wgrad" not in role_table(step, evidence.calls), "the base is frozen"


def test_adapters_start_at_zero_and_only_they_are_trained():
    def loss(model):
        shape = SHAPES["micro"]
        return training.language_model_loss(compiled=False)(model, data.text_batch(shape.batch, shape.seq, 0, 0)).item()

    plain, model = (models.build("micro", seed=0, device="cpu") for _ in range(2))
    model = models.add_adapters(model, 8)
    assert loss(model) == loss(plain)
    assert {adapter(name) for name, p in model.named_parameters() if p.requires_grad} == {True}
    assert {str(p.dtype) for p in model.parameters()} == {"torch.bfloat16"}


def test_the_learning_rate_of_adapters_is_the_users_or_their_default():
    def rate(**given):
        case = Case("own", "torchao", "tensorwise", emulated=True, lora=4, lora_targets=("up",))
        workload = Workload(build, batch=lambda step: torch.randn(96, 32), **given)
        setup = TrainingSetup(case, workload, backend("torchao"), torch.device("cpu"))
        return setup.optimizer(setup.fresh_model(0)).param_groups[0]["lr"]

    assert rate() == 2e-4, "raise 'measurement' in Case.digest() with the rate, then this line"
    assert rate(learning_rate=1e-5) == 1e-5


@pytest.mark.parametrize("name", ["lm_head", "model.lm_head.original_module", "lm_head.modules_to_save.default"])
def test_a_head_of_which_peft_trains_a_copy_stays_a_head(name):
    assert reason_to_skip(name, 64, 256).kind is Stays.HEAD
    assert reason_to_skip(name.replace("lm_head", "up_proj"), 64, 256) is None


# -- layers that hang in two places -----------------------------------------------------------------------------------


def towers():
    def tower(linear):
        return nn.ModuleDict({"shared": linear, "own": nn.Linear(64, 32)})

    one = tower(nn.Linear(16, 64))
    return nn.ModuleDict({"one": one, "other": tower(one["shared"]), "alias": one["own"]})


@pytest.mark.parametrize(
    ("name", "library", "recipe"),
    [
        ("torchao", contextlib.nullcontext, "tensorwise"),
        ("transformer_engine", te_stand_in.installed, "delayed"),
    ],
)
def test_a_shared_linear_is_one_fp8_layer_and_a_model_may_be_one(name, library, recipe):
    case = Case("own", name, recipe, emulated=name == "torchao")
    with library():
        model, chosen = towers(), backend(name)
        weight = model.get_submodule("one.shared").weight
        made = chosen.convert(model, case)
        assert chosen.is_fp8_layer(model.get_submodule("one.shared"))
        assert model.get_submodule("other.shared") is model.get_submodule("one.shared")
        assert model["alias"] is model.get_submodule("one.own")
        assert model.get_submodule("one.shared").weight is weight
        assert made.converted == ["one.shared", "one.own", "other.own"]
        assert not [module for module in model.modules() if type(module) is nn.Linear]
        alone = chosen.prepare(nn.Linear(16, 32), lambda model: torch.optim.SGD(model.parameters()), case)
        assert chosen.is_fp8_layer(alone.model)
        assert alone.conversion.converted == [""]


def test_deepspeeds_placeholders_are_known_wherever_deepspeed_is_loaded(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", types.ModuleType("deepspeed"))
    model = nn.Linear(1, 1, bias=False)
    model.weight = nn.Parameter(torch.empty(0))
    model.weight.ds_id, model.weight.ds_shape = 0, (32, 64)
    model.weight.ds_tensor = torch.zeros(1024)
    found = weights_of(model)["weight"]
    assert (tuple(found.shape), found.digest) == ((32, 64), "")


# -- the suite's own models -------------------------------------------------------------------------------------------


@torch.no_grad()
def logits(model, tokens):
    return model(input_ids=tokens).logits.float()


def test_a_forward_pass_is_causal():
    model = models.build("micro", seed=0, device="cpu").eval()
    tokens = torch.randint(0, 256, (1, 24), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, 16] = (changed[0, 16] + 1) % 256
    before, after = logits(model, tokens), logits(model, changed)
    assert before[:, :16].equal(after[:, :16])
    assert not before[:, 16:].equal(after[:, 16:])
