"""The suite's models as plain numbers: sizes, token counts, steps and learning rates. No torch here.

"1b", "3b" and "8b" have the shapes of Llama-3.2-1B, Llama-3.2-3B and Llama-3.1-8B (their ``config.json``); the others
have sizes that published work on FP8 training used.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Shape:
    """A decoder of the Llama architecture and the training step it is measured with.

    One training step has ``batch`` x ``seq`` tokens, in every question. The loss question compares ``loss_steps`` steps
    and starts with ``loss_seeds`` seeds. The learning rates of 1B and 8B are small because training starts from random
    weights without a warm-up: with ten times larger ones the loss jumps between 8 and 20 nats, where a difference of
    hundredths says nothing.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    batch: int
    seq: int
    loss_steps: int
    loss_seeds: int
    learning_rate: float
    head_dim: int | None = None
    tied: bool = False
    rope_theta: float = 500_000.0

    def describe(self) -> dict[str, Any]:
        """All fields, for the case's hash: each can change a measured number."""
        return asdict(self)


# The vocabulary of "micro" and "tiny" is the 256 byte values; every model here trains on bytes.
SHAPES: dict[str, Shape] = {
    # hidden, layers, heads, kv_heads, intermediate, vocab, batch, seq, loss_steps, loss_seeds, learning_rate.
    # The model of the emulated controls: a step takes 50 ms on one core. 96 tokens, because a token count equal to one
    # of the sizes would leave open which product belongs to which role.
    "micro": Shape(64, 2, 2, 1, 192, 256, 4, 24, 20, 3, 1e-3),
    "tiny": Shape(256, 4, 4, 2, 768, 256, 4, 128, 30, 3, 1e-3),
    # Enough sequences that the GPU is busy for longer than a host takes to launch the step. With 8 sequences, 43 ms of
    # work at 182m, Transformer Engine's arm took 92 ms on one H200's host and less on others: that measures the host.
    "182m": Shape(768, 16, 12, 4, 3072, 32_768, 24, 2048, 20, 4, 6e-4, tied=True),
    "350m": Shape(896, 24, 14, 14, 3584, 32_000, 32, 1024, 20, 4, 6e-4),
    "454m": Shape(1024, 24, 16, 16, 4096, 32_000, 24, 1024, 20, 4, 6e-4),
    "1b": Shape(2048, 16, 32, 8, 8192, 128_256, 4, 2048, 20, 3, 3e-5, head_dim=64, tied=True),
    "3b": Shape(3072, 28, 24, 8, 8192, 128_256, 2, 2048, 16, 3, 1e-5, head_dim=128, tied=True),
    # A quarter and half of 8B's layers: both arms of a pair stay resident on two GPUs of 80 GB, under ZeRO-3 and FSDP2.
    "8b8": Shape(4096, 8, 32, 8, 14_336, 128_256, 1, 4096, 12, 3, 5e-6, head_dim=128),
    "8b16": Shape(4096, 16, 32, 8, 14_336, 128_256, 1, 4096, 12, 3, 5e-6, head_dim=128),
    "8b": Shape(4096, 32, 32, 8, 14_336, 128_256, 1, 4096, 12, 3, 5e-6, head_dim=128),
}
