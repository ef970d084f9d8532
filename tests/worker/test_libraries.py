"""Other libraries in an arm, on a CPU: Accelerate, transformers' Trainer, peft and Unsloth."""

from __future__ import annotations

import pytest

pytest.importorskip("torchao")
pytest.importorskip("accelerate")
pytest.importorskip("peft")
import contextlib
import sys
import types
from collections import Counter

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from helpers import te_stand_in
from helpers.nets import build, judge_both
from pytest_fp8 import Case, SettingsError, Verdict, Workload, backends
from pytest_fp8.arms.spec import ArmSpec
from pytest_fp8.backends import backend, unsloth
from pytest_fp8.backends.accelerate import (
    AccelerateTorchAO,
    AccelerateTransformerEngine,
    keep_out_of_compiled_code,
)
from pytest_fp8.backends.linears import reason_to_skip
from pytest_fp8.backends.trainer import by_trainer
from pytest_fp8.codes import R
from pytest_fp8.plain import from_plain
from pytest_fp8.questions.layers.check import check_layers
from pytest_fp8.questions.layers.evidence import LayersEvidence
from pytest_fp8.questions.layers.products import role_table
from pytest_fp8.recipes import Stays
from pytest_fp8.said import WorkloadError
from pytest_fp8.worker.answers.layers import class_path
from pytest_fp8.worker.checkpoint import roundtrip
from pytest_fp8.worker.error_trace import known_cause
from pytest_fp8.worker.notes import weights_of
from pytest_fp8.worker.record.recorder import StepRecorder
from pytest_fp8.worker.record.tables import layer_table
from pytest_fp8.worker.run.engine import Engine
from pytest_fp8.worker.server import ArmServer
from pytest_fp8.worker.tensors import digests
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
    case = Case("1b", "trainer_te", "delayed", {"margin": 2, "amax_compute_algo": "max"})
    assert backend("trainer_te").environment(case) == {
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


# -- Unsloth, with a stand-in that loads the same folder ---------------------------------------------------------------

UNSLOTH = Case("micro", "unsloth_bf16", "none", lora=4, lora_targets=("q_proj", "v_proj"))


class FastLanguageModel:
    """Loads with transformers and adds adapters with peft, in float32, as the real one does."""

    loads = 0

    @staticmethod
    def from_pretrained(name, *, dtype, **_):
        FastLanguageModel.loads += 1
        tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=True)
        return AutoModelForCausalLM.from_pretrained(name, dtype=dtype, local_files_only=True), tokenizer

    @staticmethod
    def get_peft_model(model, *, r, lora_alpha, lora_dropout, target_modules, random_state, **_):
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(random_state)
        config = LoraConfig(
            r=r, lora_alpha=lora_alpha, lora_dropout=lora_dropout, target_modules=target_modules, task_type="CAUSAL_LM"
        )
        return get_peft_model(model, config)


def matmul_lora(x, weight, state, a, b, scale):
    out = x @ weight.t()
    return out if a is None else out + scale * (x @ a.to(x.dtype).t() @ b.to(x.dtype).t())


@pytest.fixture
def library(monkeypatch):
    made = types.ModuleType("unsloth")
    made.FastLanguageModel = FastLanguageModel
    kernels = types.ModuleType("unsloth.kernels")
    kernels.fast_lora = types.SimpleNamespace(matmul_lora=matmul_lora)
    monkeypatch.setitem(sys.modules, "unsloth", made)
    monkeypatch.setitem(sys.modules, "unsloth.kernels", kernels)
    return kernels.fast_lora


@pytest.fixture
def engine(library):
    return Engine(ArmSpec(UNSLOTH, "cpu"))


def test_the_loss_is_that_of_the_suite_without_the_last_token_of_each_row():
    batch = data.text_batch(2, 16, seed=0, step=0)
    logits = torch.randn(2, 16, 256)

    class Model:
        def __call__(self, input_ids, labels):
            # transformers' own convention: position i is scored by the label of position i + 1.
            shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), shifted.flatten())
            return types.SimpleNamespace(loss=loss)

    before = batch["labels"].clone()
    loss = unsloth.language_model_loss(Model(), batch)
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), before[:, :-1].flatten())
    assert loss == pytest.approx(float(expected))
    assert torch.equal(batch["labels"], before)


def test_a_restart_gives_both_arms_the_same_adapters_and_loads_nothing(library, engine):
    other = Engine(ArmSpec(UNSLOTH, "cpu"))
    loads, base = FastLanguageModel.loads, engine.model.state_dict()["base_model.model.model.embed_tokens.weight"]
    before = base.clone()
    for arm in (engine, other):
        arm.restart(seed=5)
    mine, theirs = (digests(roundtrip.weights_of(arm)[0]) for arm in (engine, other))
    assert mine == theirs
    assert FastLanguageModel.loads == loads
    assert torch.equal(base, before)
    assert unsloth.UnslothBf16().seeded_values(engine.model, 5).keys() == roundtrip.weights_of(engine)[0].keys()
    other.restart(seed=6)
    assert digests(roundtrip.weights_of(other)[0]) != mine


def test_only_adapters_are_stored_and_loaded(engine, tmp_path):
    saved = roundtrip.save(engine, tmp_path, "safetensors", optimizer=True)
    assert all(".lora_" in key for key in saved.digests)
    assert len(saved.digests) == 8
    assert saved.frozen == len(engine.model.state_dict()) - 8
    assert saved.on_disk == {"F32": 8}
    loaded = roundtrip.load(engine, tmp_path, "safetensors", optimizer=True, seed=5)
    assert not loaded.refused
    assert loaded.digests == saved.digests
    assert loaded.optimizer_digests == saved.optimizer_digests


class FusedLora(torch.nn.Module):
    """As the library's fused functions: two layers' products and their adapters', with neither module called, in an
    autograd function, whose forward pass runs without gradients."""

    def __init__(self, library):
        super().__init__()
        self.q, self.a, self.b = (torch.nn.Linear(*size, bias=False) for size in ((32, 16), (32, 4), (4, 16)))
        self.q.requires_grad_(False)

        class Product(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, q, a, b):
                ctx.save_for_backward(q)
                return library.matmul_lora(x, q, None, a, b, 2.0)

            @staticmethod
            def backward(ctx, dy):
                (q,) = ctx.saved_tensors
                return library.matmul_lora(dy, q.t(), None, None, None, None), None, None, None

        self.product = Product

    def forward(self, x):
        return self.product.apply(x, self.q.weight, self.a.weight, self.b.weight)


def test_products_without_a_call_of_their_module_are_seen(library):
    model = FusedLora(library)
    sizes = {name: (m.in_features, m.out_features) for name, m in model.named_children()}
    backend = unsloth.UnslothBf16()
    backend.is_fp8_layer = lambda layer: layer is model.q
    recorder, sampled = StepRecorder(model, backend, sizes), []
    # The probe of the same step takes a sample of each FP8 layer's product, which is no product of the step.
    with recorder.watching(), backend.watch_fused_functions(model, lambda *note: sampled.append(note)):
        with recorder.in_phase("forward"):
            out = model(torch.randn(3, 8, 32, requires_grad=True))
        with recorder.in_phase("backward"):
            out.sum().backward()
    calls = layer_table(recorder.table, sizes).calls
    assert [(c.name, c.rows, "dgrad" in c.owed, "wgrad" in c.owed) for c in calls] == [
        ("q", 24, True, False),
        ("a", 24, True, True),
        ("b", 24, True, True),
    ]
    assert library.matmul_lora is matmul_lora


def quantized(granularity):
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow, PerTensor, quantize_

    layer = torch.nn.Linear(64, 32, bias=False, dtype=torch.bfloat16)
    made = {"row": PerRow, "tensor": PerTensor}[granularity]()
    with contextlib.ExitStack() as stack:
        patch = pytest.MonkeyPatch()
        stack.callback(patch.undo)
        # torchao asks for the GPU's capability before it quantizes.
        patch.setattr("torchao.quantization.quant_api.is_sm_at_least_89", lambda: True)
        patch.setattr("torchao.quantization.quant_api._check_hardware_support", lambda *_: None, raising=False)
        quantize_(layer, Float8DynamicActivationFloat8WeightConfig(granularity=made, activation_value_lb=1e-12))
    return layer


def test_the_recipe_is_read_from_torchaos_own_tensor():
    backend = unsloth.Unsloth()
    layer = quantized("row")
    assert backend.is_fp8_layer(layer)
    assert backend.recipe_in_force(layer) == {"recipe": "rowwise"}
    assert backend.recipe_in_force(quantized("tensor")) == {"recipe": "tensorwise"}
    assert not backend.is_fp8_layer(torch.nn.Linear(4, 4))


def test_a_wrong_installation_is_told_with_its_first_error(tmp_path, monkeypatch):
    (tmp_path / "unsloth.py").write_text("raise RuntimeError('no xformers')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "unsloth", raising=False)
    monkeypatch.setattr(backends, "_failed", {})
    for _ in range(2):
        with pytest.raises(backends.LibraryError, match="RuntimeError: no xformers") as error:
            backends.import_library("unsloth_bf16")
    assert known_cause(error.value)[0] is R.NOT_INSTALLED
