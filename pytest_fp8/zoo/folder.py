"""Writes a model of the suite to a folder, for libraries that load from folders only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pytest_fp8.zoo import models

SPECIAL = ("<|pad|>", "<|begin|>", "<|end|>")
"""Special tokens in the order of their ids; begin and end have the ids of a Llama configuration."""


def write_model(name: str, folder: Path, *, seed: int, device: str) -> None:
    """The model ``name`` with the weights of ``seed``, as ``config.json``, safetensors and a tokenizer.

    The configuration names no attention function: the suite's own is registered in this process only.
    """
    model = models.build(name, seed=seed, device=device)
    model.save_pretrained(folder)  # type: ignore[operator]
    tokenizer(model.config.vocab_size).save_pretrained(folder)  # type: ignore[union-attr,arg-type]


def tokenizer(vocab: int) -> Any:
    """A byte-level tokenizer of ``vocab`` entries: the special ones, the bytes as far as they fit, then fillers.

    Nothing is tokenized with it. Loaders read it all the same, and enlarge the embedding of a model whose tokenizer has
    no padding token or more entries than the model.
    """
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    fillers = (f"<|{index}|>" for index in range(vocab))
    entries = [*SPECIAL, *letters, *fillers][:vocab]
    made = Tokenizer(BPE(vocab={entry: index for index, entry in enumerate(entries)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    pad, begin, end = SPECIAL
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token=pad, bos_token=begin, eos_token=end)
