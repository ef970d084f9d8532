"""Known defects of libraries, each asserted as it should be. Strict: a release without the defect fails here."""

from importlib.metadata import PackageNotFoundError, version

import pytest

import matrix
from pytest_fp8 import Case
from pytest_fp8.codes import K, L
from pytest_fp8.errors import ArmError


def known(package, what, raises=AssertionError):
    """A strict xfail that names the installed release, read without importing it."""
    try:
        release = version(package)
    except PackageNotFoundError:
        release = "(not installed)"
    return pytest.mark.xfail(strict=True, raises=raises, reason=f"{package} {release}: {what}")


class Known(AssertionError):
    """The defect itself. The only failure that is expected: a hung arm or a loss that is not finite is another one."""


def judge(decision, code):
    """Raises :class:`Known` where the decision has this code, and fails the test where it fails with another."""
    if not decision.verdict.passes:
        if decision.code is code:
            raise Known(decision.message)
        pytest.fail(decision.message, pytrace=False)


WRAPPED = "enable_fsdp_float8_all_gather, on by default, wraps weights into parameters that the optimizer never gets"


@pytest.mark.fp8(
    cases=matrix.on_hopper(
        [Case("micro", "trainer_torchao", "tensorwise", emulated=True), Case("tiny", "trainer_torchao", "tensorwise")]
    )
)
@pytest.mark.usefixtures("healthy_alone")
class TestTrainerWithTorchAO:
    @pytest.mark.nightly
    @known("accelerate", WRAPPED, Known)
    def test_every_weight_is_trained(self, fp8_pair):
        judge(fp8_pair.loss(), L.NOT_IN_OPTIMIZER)

    @known("accelerate", "weights wrapped for FSDP2 have no storage that safetensors can write", Known)
    def test_the_model_can_be_saved(self, fp8_pair):
        try:
            decision = fp8_pair.checkpoints()
        except ArmError as error:
            if "storage" in error.message:
                raise Known(error.message) from None
            raise
        assert decision.verdict.passes, decision.message


@pytest.mark.fp8(cases=matrix.on_hopper(Case("tiny", name, "delayed") for name in ("accelerate_te", "trainer_te")))
@known("accelerate", "amax_compute_algo='most_recent' is dropped; max is in force", Known)
@pytest.mark.usefixtures("healthy_alone")
def test_the_recipe_asked_for_is_in_force(fp8_pair):
    judge(fp8_pair.layers(), L.OTHER_RECIPE)


def recomputed_step(model):
    """Runs in the arm. The error of a step under activation checkpointing, switched on as the Trainer does it; empty
    without one."""
    import torch
    from torch.utils.checkpoint import CheckpointError

    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    tokens = torch.zeros(4, 128, dtype=torch.long, device="cuda")
    try:
        model(input_ids=tokens, labels=tokens).loss.backward()
    except CheckpointError as error:
        return str(error).strip().splitlines()[0]
    finally:
        # Other tests use the same arm.
        model.gradient_checkpointing_disable()
        model.zero_grad(set_to_none=True)
    return ""


@pytest.mark.fp8(cases=matrix.on_hopper([Case("tiny", "accelerate_te", "delayed", matrix.MOST)]))
@known(
    "accelerate",
    "te.autocast around forward alone: what gradient checkpointing recomputes later runs in BF16, and fails",
)
@pytest.mark.usefixtures("healthy_alone")
def test_activations_can_be_recomputed(fp8_pair):
    assert fp8_pair.fp8.call(recomputed_step) == ""


@pytest.mark.fp8(
    cases=matrix.on_hopper(
        Case("tiny", name, "delayed", matrix.MOST, lora=16) for name in ("unsloth_te", "accelerate_te")
    )
)
@known("accelerate", "convert_model takes adapters for layers like any other", Known)
@pytest.mark.usefixtures("healthy_alone")
def test_adapters_stay_in_high_precision(fp8_pair):
    judge(fp8_pair.layers(), L.LEFT_AND_CONVERTED)


@pytest.mark.fp8(cases=matrix.on_hopper([Case("1b", "accelerate_te", "delayed", matrix.MOST)]))
@pytest.mark.usefixtures("healthy_alone")
class TestTiedHead:
    @known("accelerate", "convert_model copies weights, which unties a tied head", Known)
    def test_the_head_is_still_the_embedding(self, fp8_pair):
        # Asked after presence: whatever does not run in FP8 fails in other words.
        judge(fp8_pair.layers(), L.UNTIED)

    @known("accelerate", "convert_model unties the head, which the optimizer does not get", Known)
    def test_the_head_is_trained(self, fp8_pair):
        judge(fp8_pair.loss(), L.NOT_IN_OPTIMIZER)

    @known("accelerate", "convert_model unties the head, which a checkpoint then holds twice", Known)
    def test_a_checkpoint_can_be_carried_back(self, fp8_pair):
        judge(fp8_pair.checkpoints(), K.UNTIED)


def scales_that_do_not_come_back(model):
    """Tensors of Transformer Engine's scaling state that differ once the model's own state dict is loaded again."""
    import os

    from pytest_fp8.backends.transformer_engine import TransformerEngine

    os.environ["NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"] = "1"
    backend = TransformerEngine()

    def scales():
        layers = {name: backend.scaling(layer) for name, layer in model.named_modules()}
        return {f"{name} {key}": t.clone() for name, kept in layers.items() if kept for key, t in kept.tensors.items()}

    trained = scales()
    state = {key: value for key, value in model.state_dict().items() if backend.is_scaling_state(key)}
    backend.reset_scaling(model)
    assert trained, "no layer keeps scales"
    assert any(not new.equal(trained[name]) for name, new in scales().items()), "nothing was reset"
    model.load_state_dict(state, strict=False)
    return [name for name, loaded in scales().items() if not loaded.equal(trained[name])]


@pytest.mark.usefixtures("healthy_alone")
@pytest.mark.fp8(cases=[Case("tiny", "transformer_engine", "delayed", chip="hopper")], question="layers")
def test_scaling_state_comes_back_with_the_state_dict(fp8_pair):
    fp8_pair.layers()
    assert fp8_pair.fp8.call(scales_that_do_not_come_back) == []
