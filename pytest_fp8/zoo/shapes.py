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

    @property
    def tokens(self) -> int:
        """Tokens in one timed training step."""
        return self.batch * self.seq

    @property
    def parameters(self) -> int:
        """Trainable parameters, embeddings included."""
        head_dim = self.head_dim or self.hidden // self.heads
        attention = self.hidden * head_dim * (2 * self.heads + 2 * self.kv_heads)
        block = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        return self.layers * block + embeddings + self.hidden

    def describe(self) -> dict[str, Any]:
        """All fields, for the case's hash: each can change a measured number."""
        return asdict(self)


# The vocabulary of "micro" and "tiny" is the 256 byte values; every model here trains on bytes.
SHAPES: dict[str, Shape] = {
    # The model of the emulated controls: a step takes 50 ms on one core. 96 tokens, because a token count equal to one
    # of the sizes would leave open which product belongs to which role.
    "micro": Shape(
        hidden=64,
        layers=2,
        heads=2,
        kv_heads=1,
        intermediate=192,
        vocab=256,
        batch=4,
        seq=24,
        loss_steps=20,
        loss_seeds=3,
        learning_rate=1e-3,
    ),
    "tiny": Shape(
        hidden=256,
        layers=4,
        heads=4,
        kv_heads=2,
        intermediate=768,
        vocab=256,
        batch=4,
        seq=128,
        loss_steps=30,
        loss_seeds=3,
        learning_rate=1e-3,
    ),
    # Enough sequences that the GPU is busy for longer than a host takes to launch the step. With 8 sequences, 43 ms of
    # work at 182m, Transformer Engine's arm took 92 ms on one H200's host and less on others: that measures the host.
    "182m": Shape(
        hidden=768,
        layers=16,
        heads=12,
        kv_heads=4,
        intermediate=3072,
        vocab=32_768,
        batch=24,
        seq=2048,
        loss_steps=20,
        loss_seeds=4,
        learning_rate=6e-4,
        tied=True,
    ),
    "350m": Shape(
        hidden=896,
        layers=24,
        heads=14,
        kv_heads=14,
        intermediate=3584,
        vocab=32_000,
        batch=32,
        seq=1024,
        loss_steps=20,
        loss_seeds=4,
        learning_rate=6e-4,
    ),
    "454m": Shape(
        hidden=1024,
        layers=24,
        heads=16,
        kv_heads=16,
        intermediate=4096,
        vocab=32_000,
        batch=24,
        seq=1024,
        loss_steps=20,
        loss_seeds=4,
        learning_rate=6e-4,
    ),
    "1b": Shape(
        hidden=2048,
        layers=16,
        heads=32,
        kv_heads=8,
        head_dim=64,
        intermediate=8192,
        vocab=128_256,
        batch=4,
        seq=2048,
        loss_steps=20,
        loss_seeds=3,
        learning_rate=3e-5,
        tied=True,
    ),
    "3b": Shape(
        hidden=3072,
        layers=28,
        heads=24,
        kv_heads=8,
        head_dim=128,
        intermediate=8192,
        vocab=128_256,
        batch=2,
        seq=2048,
        loss_steps=16,
        loss_seeds=3,
        learning_rate=1e-5,
        tied=True,
    ),
    "8b": Shape(
        hidden=4096,
        layers=32,
        heads=32,
        kv_heads=8,
        head_dim=128,
        intermediate=14_336,
        vocab=128_256,
        batch=1,
        seq=4096,
        loss_steps=12,
        loss_seeds=3,
        learning_rate=5e-6,
    ),
}
