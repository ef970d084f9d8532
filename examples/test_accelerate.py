"""Accelerator(mixed_precision="fp8"): a small Llama of transformers, prepared with its optimizer."""

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


@pytest.mark.fp8(backend="accelerate_torchao", recipe="tensorwise", emulated=True, name="accelerate")
def test_without_a_gpu(fp8_pair):
    fp8_pair.assert_layers()
    fp8_pair.assert_numerics()
    fp8_pair.assert_loss()


@pytest.mark.fp8(backend="accelerate_torchao", recipe="tensorwise", name="accelerate")
def test_torchao(fp8_pair):
    fp8_pair.assert_layers()
    fp8_pair.assert_numerics()
    fp8_pair.assert_loss()


@pytest.mark.fp8(backend="accelerate_te", recipe="delayed", options={"amax_compute_algo": "max"}, name="accelerate")
def test_transformer_engine(fp8_pair):
    """Accelerate 1.15 drops its own default, most_recent, and trains with max."""
    fp8_pair.assert_layers()
    fp8_pair.assert_numerics()
    fp8_pair.assert_loss()
