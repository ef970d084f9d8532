"""The Unsloth backend on a CPU, with a stand-in for the library that loads the same folder."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import types

import pytest

pytest.importorskip("peft")
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pytest_fp8 import Case, backends
from pytest_fp8.arms.spec import ArmSpec
from pytest_fp8.backends import unsloth
from pytest_fp8.codes import R
from pytest_fp8.worker.checkpoint import roundtrip
from pytest_fp8.worker.error_trace import known_cause
from pytest_fp8.worker.record.recorder import StepRecorder
from pytest_fp8.worker.record.tables import layer_table
from pytest_fp8.worker.run.engine import Engine
from pytest_fp8.worker.tensors import digests
from pytest_fp8.zoo import data

pytestmark = pytest.mark.slow

CASE = Case("micro", "unsloth_bf16", "none", lora=4, lora_targets=("q_proj", "v_proj"))


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
    return Engine(ArmSpec(CASE, "cpu"))


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
    other = Engine(ArmSpec(CASE, "cpu"))
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


class Fused(torch.nn.Module):
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
    model = Fused(library)
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


FAKE = """
import sys
print("UNSLOTH BEFORE", "transformers" in sys.modules)
"""


def test_its_own_arm_imports_the_library_before_transformers(tmp_path):
    (tmp_path / "unsloth.py").write_text(FAKE)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from pytest_fp8.worker.main import import_ahead; "
    out = subprocess.run(
        [sys.executable, "-c", code + "import_ahead('unsloth_bf16')"], capture_output=True, text=True, check=True
    )
    assert out.stdout == "UNSLOTH BEFORE False\n"


def test_a_wrong_installation_is_told_with_its_first_error(tmp_path, monkeypatch):
    (tmp_path / "unsloth.py").write_text("raise RuntimeError('no xformers')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "unsloth", raising=False)
    monkeypatch.setattr(backends, "_failed", {})
    for _ in range(2):
        with pytest.raises(backends.LibraryError, match="RuntimeError: no xformers") as error:
            backends.import_library("unsloth_bf16")
    assert known_cause(error.value)[0] is R.NOT_INSTALLED
