"""FP8 under the Trainer of transformers, which the environment switches on, as `accelerate launch` does."""

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


# By default Accelerate wraps the weights for FSDP2, even where there is no FSDP. No optimizer then trains them, and the
# test fails. A script needs ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER=false in its environment.
NO_ALL_GATHER = {"fp8_all_gather": False}


@pytest.mark.fp8(backend="trainer_torchao", options=NO_ALL_GATHER, emulated=True, name="trainer")
def test_without_a_gpu(fp8_pair):
    fp8_pair.assert_layers()
    fp8_pair.assert_numerics()
    fp8_pair.assert_loss()


@pytest.mark.fp8(backend="trainer_torchao", options=NO_ALL_GATHER, name="trainer")
def test_torchao(fp8_pair):
    fp8_pair.assert_layers()
    fp8_pair.assert_numerics()
    fp8_pair.assert_loss()


@pytest.mark.fp8(backend="trainer_te", recipe="delayed", options={"amax_compute_algo": "max"}, name="trainer")
def test_transformer_engine(fp8_pair):
    """Accelerate 1.15 drops its own default, most_recent, and trains with max."""
    fp8_pair.assert_layers()
    fp8_pair.assert_numerics()
    fp8_pair.assert_loss()
