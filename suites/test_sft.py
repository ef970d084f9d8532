"""TRL's SFTTrainer in FP8 through Accelerate: sequences padded, packed, and adapters on a frozen base.

On a CPU the model is micro, on a GPU tiny.
"""

from functools import partial
from importlib.util import find_spec

import pytest

from integrations import SFT
from pytest_fp8 import Workload

SEQUENCES = 256
LONGEST = 64


def build(size):
    import torch

    from pytest_fp8.zoo import models

    device = "cpu" if size == "micro" else "cuda"
    return models.build(size, seed=torch.initial_seed(), device=device, dtype=torch.bfloat16)


def sequences():
    """Bytes that grow by one to three, 24 to 64 of them in a row: already tokens, as SFTTrainer takes them too."""
    import torch
    from datasets import Dataset

    draws = torch.Generator().manual_seed(0)
    lengths = torch.randint(24, LONGEST + 1, (SEQUENCES,), generator=draws).tolist()
    return Dataset.from_dict(
        {"input_ids": [(torch.randint(1, 4, (n,), generator=draws).cumsum(0) % 254 + 2).tolist() for n in lengths]}
    )


def tokenizer():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<eos>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def make_trainer(model, name):
    import tempfile

    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    # SFTConfig's own defaults are bf16=True, which wins over FP8, and recomputation, which ends no step in FP8 of
    # Transformer Engine through Accelerate.
    arguments = SFTConfig(
        output_dir=tempfile.gettempdir(),
        bf16=False,
        gradient_checkpointing=False,
        learning_rate=1e-3,
        per_device_train_batch_size=8,
        max_length=LONGEST,
        packing=name == "sft_packed",
        packing_strategy="wrapped",
        pad_to_multiple_of=16,
    )
    adapters = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    return SFTTrainer(
        model,
        args=arguments,
        train_dataset=sequences(),
        processing_class=tokenizer(),
        peft_config=adapters if name == "sft_lora" else None,
    )


@pytest.fixture
def fp8_workload(fp8_case):
    for package in ("trl", "peft"):
        if find_spec(package) is None:
            pytest.skip(f"needs {package}: pip install pytest-fp8[sft]")
    size = "micro" if fp8_case.emulated else "tiny"
    return Workload(partial(build, size), trainer=partial(make_trainer, name=fp8_case.name))


@pytest.mark.fp8(cases=SFT, question="layers")
def test_all_but_head_first_layer_and_adapters_is_fp8(fp8_pair):
    fp8_pair.assert_layers()


@pytest.mark.fp8(cases=SFT, question="numerics")
def test_numerics(fp8_pair):
    fp8_pair.assert_numerics()


@pytest.mark.fp8(cases=SFT, question="loss")
def test_the_loss_is_right(fp8_pair):
    fp8_pair.assert_loss()
