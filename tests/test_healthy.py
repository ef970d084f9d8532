"""Sound workloads of many kinds pass every question; the whole catalogue is for `python -m benchmarks.healthy`."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torchao")

from benchmarks.healthy.catalogue import CATALOGUE
from benchmarks.healthy.run import Runner
from benchmarks.healthy.sound import Sound
from pytest_fp8 import Workload

pytestmark = pytest.mark.slow

ONCE_FAILED = (
    "counter_in_the_model",
    "complex_buffer",
    "layers_dropped_by_python",
    "augmented_by_numpy",
    "dataclass_batch",
    "object_batch",
    "encoding_of_transformers",
    "adversarial_examples",
    "block_of_every_other_step",
    "hook_on_a_tensor",
    "plateau",
    "sparse_graph",
    "hf_bert_body_of_eight_sentences",
    "hf_bert_chooses",
    "batch_AttrDict",
    "gradual_unfreezing",
    "step_looked_up_once",
    "sam_of_two_steps",
    "schedule_of_ten_lines",
    "step_that_calls_parts",
    "layer_that_casts",
    "router_in_float32",
    "replay_in_the_model",
    "tensor_parallel",
)
EACH_COMMIT = (
    "augmented_by_numpy",
    "block_of_every_other_step",
    "gradual_unfreezing",
    "layer_that_casts",
    "plateau",
    "replay_in_the_model",
    "sam_of_two_steps",
)
"""One a kind: data, layers that come and go, frozen weights, a layer, a schedule, state of the model, a step."""
CHOSEN = [
    pytest.param(entry, id=entry.name, marks=[pytest.mark.nightly] * (entry.name not in EACH_COMMIT))
    for index, entry in enumerate(CATALOGUE)
    if index % 12 == 0 or entry.name in ONCE_FAILED
]
"""Every twelfth one beside those that once failed; ``python -m benchmarks.healthy`` asks all."""


@pytest.fixture(scope="module")
def runner():
    with Runner() as made:
        yield made


@pytest.mark.parametrize("entry", CHOSEN)
def test_a_sound_workload_hears_no_alarm(runner, entry):
    alarms = [answer.message for answer in runner.ask(entry, "tensorwise") if answer.alarm]
    assert not alarms, "\n".join(alarms)


def test_what_is_not_sound_is_an_alarm(runner):
    def one_of_two(model):
        from torchao.float8 import convert_to_float8_training

        from pytest_fp8.backends.torchao import torchao_config

        config = torchao_config("tensorwise", emulated=True)
        return convert_to_float8_training(model, config=config, module_filter_fn=lambda module, name: name == "0")

    def build():
        import torch

        return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))

    def batch(step):
        import torch

        return torch.randn(32, 64)

    def loss(model, x):
        return (model(x) - x).float().square().mean()

    entry = Sound("broken", "", lambda: Workload(build=build, batch=batch, loss=loss, convert=one_of_two))
    assert any(answer.alarm for answer in runner.ask(entry, "tensorwise"))


@pytest.mark.parametrize(
    ("factor", "verdict"),
    [
        pytest.param(1.0, "PASS", marks=pytest.mark.nightly),
        (2.0, "FAIL"),
        pytest.param(0.0, "FAIL", marks=pytest.mark.nightly),
        pytest.param(-1.0, "FAIL", marks=pytest.mark.nightly),
    ],
)
def test_a_wrong_gradient_fails_where_gradients_cancel_between_rows(runner, factor, verdict):
    """Its limit is wide there, beside operands that are moved row by row; no product is wrong. On a CPU with matrix
    units for bfloat16 the healthy gradient's gain is 0.89 and may be 0.39 from 1: a factor of 1.5 is within that."""

    def convert(model):
        from torchao.float8 import convert_to_float8_training

        from pytest_fp8.backends.torchao import torchao_config

        def body(module, name):
            return "classifier" not in name

        config = torchao_config("tensorwise", emulated=True)
        convert_to_float8_training(model, config=config, module_filter_fn=body)
        model.bert.encoder.layer[1].output.LayerNorm.bias.register_hook(lambda gradient: factor * gradient)
        return model

    chooses = next(entry for entry in CATALOGUE if entry.name == "hf_bert_chooses")
    entry = Sound("broken", "", lambda: replace(chooses.workload(0), convert=convert))
    decision = runner.pair(entry, "tensorwise").numerics()
    assert decision.verdict.value == verdict, decision.message


def test_complex_buffers_keep_their_imaginary_parts(runner):
    entry = next(entry for entry in CATALOGUE if entry.name == "complex_buffer")
    pair = runner.pair(entry, "tensorwise")
    for arm in (pair.bf16, pair.fp8):
        kind, imaginary = arm.call(lambda model: (str(model.turns.dtype), model.turns.imag.abs().max().item()))
        assert kind == "torch.complex64"
        assert imaginary > 0.9


def test_the_catalogue_is_wide():
    names = [entry.name for entry in CATALOGUE]
    assert len(names) == len(set(names)) >= 100
    assert all(entry.what.endswith(".") for entry in CATALOGUE), "each says what is special about it"
    assert sum(name.startswith("hf_") for name in names) >= 10
