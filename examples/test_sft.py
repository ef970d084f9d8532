"""TRL's SFTTrainer in FP8 through Accelerate: the test trains with the Trainer that the script makes."""

import tempfile
from functools import partial
from importlib.util import find_spec

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from pytest_fp8 import Case, Workload

pytestmark = pytest.mark.skipif(find_spec("trl") is None, reason="needs trl: pip install pytest-fp8[sft]")

WORDS = ["<pad>", "<eos>", *(f"w{number}" for number in range(254))]


def build():
    """A script has from_pretrained() here."""
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=2,
            vocab_size=256,
        )
    )


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<eos>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def texts():
    """The next word is one, two or three places after the last."""
    from datasets import Dataset

    draws = torch.Generator().manual_seed(0)
    lengths = torch.randint(24, 65, (256,), generator=draws).tolist()
    walks = (torch.randint(1, 4, (length,), generator=draws).cumsum(0) % 254 for length in lengths)
    return Dataset.from_dict({"text": [" ".join(f"w{number}" for number in walk.tolist()) for walk in walks]})


def make_trainer(model, packing=False, lora=False):
    """A script has these lines in its main(). bf16=False: SFTConfig's default is True, and wins over FP8."""
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    arguments = SFTConfig(
        output_dir=tempfile.gettempdir(),
        bf16=False,
        gradient_checkpointing=False,
        learning_rate=1e-3,
        per_device_train_batch_size=8,
        max_length=64,
        packing=packing,
        packing_strategy="wrapped",
        pad_to_multiple_of=16,
    )
    adapters = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM") if lora else None
    return SFTTrainer(model, args=arguments, train_dataset=texts(), processing_class=tokenizer(), peft_config=adapters)


WORKLOADS = {
    "sft_padded": Workload(build, trainer=make_trainer),
    "sft_packed": Workload(build, trainer=partial(make_trainer, packing=True)),
    "sft_lora": Workload(build, trainer=partial(make_trainer, lora=True)),
}


@pytest.fixture
def fp8_workload(fp8_case):
    return WORKLOADS[fp8_case.name]


NO_ALL_GATHER = {"fp8_all_gather": False}


@pytest.mark.fp8(backend="trainer_torchao", options=NO_ALL_GATHER, emulated=True, name="sft_padded")
def test_padded(fp8_pair):
    fp8_pair.assert_layers()
    fp8_pair.assert_numerics()
    fp8_pair.assert_loss()


@pytest.mark.fp8(backend="trainer_torchao", options=NO_ALL_GATHER, emulated=True, name="sft_packed")
def test_packed(fp8_pair):
    fp8_pair.assert_layers()
    fp8_pair.assert_numerics()
    fp8_pair.assert_loss()


@pytest.mark.fp8(backend="trainer_torchao", options=NO_ALL_GATHER, emulated=True, name="sft_lora")
def test_lora(fp8_pair):
    fp8_pair.assert_layers()
    fp8_pair.assert_numerics()
    fp8_pair.assert_loss()


ON_A_GPU = [Case("own", "trainer_torchao", "tensorwise", NO_ALL_GATHER, name=name) for name in WORKLOADS]


@pytest.mark.fp8(cases=ON_A_GPU)
def test_on_a_gpu(fp8_pair):
    fp8_pair.assert_layers()
    fp8_pair.assert_numerics()
    fp8_pair.assert_loss()
