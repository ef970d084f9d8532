"""LoRA by peft on a base in FP8: the adapters are added first, stay in BF16 and are all that is trained."""

from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from pytest_fp8 import Workload


def build():
    base = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            vocab_size=256,
        )
    )
    return get_peft_model(base, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))


def batch(step):
    """The next token is the last one and 1, 2 or 3 more. transformers shifts the labels itself."""
    tokens = torch.randint(1, 4, (8, 64)).cumsum(1) % 256
    return {"input_ids": tokens, "labels": tokens}


def convert(model):
    """Your own conversion: all Linears but adapters and head."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name("tensorwise")
    if not next(model.parameters()).is_cuda:
        config = replace(config, emulate=True)
    convert_to_float8_training(model, config=config, module_filter_fn=is_base)


def is_base(module, name):
    return "lora_" not in name and name.rpartition(".")[2] != "lm_head"


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


@pytest.fixture
def fp8_workload():
    return Workload(build, batch, optimizer=optimizer, convert=convert)


@pytest.mark.fp8(backend="torchao", recipe="tensorwise", emulated=True, name="lora")
def test_without_a_gpu(fp8_pair):
    fp8_pair.assert_layers()
    fp8_pair.assert_numerics()
    fp8_pair.assert_loss()


@pytest.mark.fp8(backend="torchao", recipe="tensorwise", name="lora")
def test_on_a_gpu(fp8_pair):
    fp8_pair.assert_layers()
    fp8_pair.assert_numerics()
    fp8_pair.assert_loss()
