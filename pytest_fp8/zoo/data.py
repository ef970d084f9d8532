"""Batches of text that every machine has: the bytes of Python's own standard library.

A byte is a token, so a vocabulary of 256 is enough; a larger one works too. The same seed and step give the same batch
in every process. Random tokens are for timing only: no loss is read from them.
"""

from __future__ import annotations

import sysconfig
import zlib
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pytest_fp8.zoo.batch import tensors_of

if TYPE_CHECKING:
    import torch

CORPUS_BYTES = 4_000_000
"""Large enough that no seed sees a window of text twice in its steps; small enough to read in milliseconds."""


@lru_cache(maxsize=1)
def corpus() -> NDArray[np.uint8]:
    """The first :data:`CORPUS_BYTES` bytes of the standard library's top-level modules, in name order.

    Raises ``FileNotFoundError`` where Python was installed without its library's sources.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    parts: list[bytes] = []
    size = 0
    for path in sorted(library.glob("*.py")):
        parts.append(path.read_bytes())
        size += len(parts[-1])
        if size >= CORPUS_BYTES:
            break
    if size < 100_000:
        raise FileNotFoundError(
            f"{library} has {size} bytes of *.py; the training text needs the standard library's sources"
        )
    return np.frombuffer(b"".join(parts)[:CORPUS_BYTES], dtype=np.uint8)


def text_batch(batch: int, seq: int, seed: int, step: int) -> dict[str, torch.Tensor]:
    """``input_ids`` and ``labels``, each int64 of shape [batch, seq]; ``labels`` are one byte ahead of the inputs."""
    import torch

    text = corpus()
    starts = np.random.default_rng([seed, step]).integers(0, len(text) - seq - 1, size=batch)
    windows = np.stack([text[start : start + seq + 1] for start in starts]).astype(np.int64)
    tokens = torch.from_numpy(windows)
    return {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def random_batch(batch: int, seq: int, vocab: int, step: int) -> dict[str, torch.Tensor]:
    """Uniform random tokens in the shapes of :func:`text_batch`, for timing."""
    import torch

    draws = np.random.default_rng([vocab, step]).integers(0, vocab, size=(batch, seq + 1), dtype=np.int64)
    tokens = torch.from_numpy(draws)
    return {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def fingerprint(batch: Any, start: int = 0) -> int:
    """CRC-32 of a batch's tensors, continued from ``start``: equal data gives equal numbers in every process."""
    import torch

    for _, tensor in tensors_of(batch):
        dense = tensor.detach().cpu()
        if dense.is_nested:
            start = fingerprint(list(dense.unbind()), start)
            continue
        if dense.layout is not torch.strided:
            dense = dense.to_dense()
        flat = dense.contiguous().reshape(-1)
        start = zlib.crc32(flat.view(torch.uint8).numpy().tobytes(), start)
    return start
