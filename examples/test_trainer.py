"""A small Llama of transformers in FP8, by Accelerator(mixed_precision="fp8") and under the Trainer.

The Trainer has no argument for FP8: the environment switches it on, as `accelerate launch` does. Keep the tests of the
way that you train.
"""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pytest_fp8 import Workload


def build():
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            vocab_size=256,
        )
    )


def batch(step):
    """The next token is the last one and 1, 2 or 3 more. transformers shifts the labels itself."""
    tokens = torch.randint(1, 4, (8, 64)).cumsum(1) % 256
    return {"input_ids": tokens, "labels": tokens}


@pytest.fixture
def fp8_workload():
    """Without a loss= the model's own is taken: its output's .loss."""
    return Workload(build, batch)


def ask(fp8_pair):
    fp8_pair.assert_layers()
    fp8_pair.assert_numerics()
    fp8_pair.assert_loss()


# By default Accelerate wraps the weights for FSDP2, even where there is no FSDP. No optimizer then trains them, and the
# test fails. A script needs ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER=false in its environment.
TRAINER = {"backend": "trainer_torchao", "options": {"fp8_all_gather": False}, "name": "trainer"}


@pytest.mark.fp8(**TRAINER, emulated=True)
def test_trainer_without_a_gpu(fp8_pair):
    ask(fp8_pair)


@pytest.mark.fp8(**TRAINER)
def test_trainer(fp8_pair):
    ask(fp8_pair)


@pytest.mark.fp8(backend="accelerate_torchao", emulated=True, name="accelerate")
def test_accelerate_without_a_gpu(fp8_pair):
    ask(fp8_pair)


@pytest.mark.fp8(backend="accelerate_torchao", name="accelerate")
def test_accelerate(fp8_pair):
    ask(fp8_pair)


# Accelerate 1.15 drops its own default, most_recent, and trains with max.
@pytest.mark.fp8(
    backend=["trainer_te", "accelerate_te"], recipe="delayed", options={"amax_compute_algo": "max"}, name="te"
)
def test_transformer_engine(fp8_pair):
    ask(fp8_pair)
