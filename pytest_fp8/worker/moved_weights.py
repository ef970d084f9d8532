"""The weights of all Linears moved at random by as much as FP8 moves products: how far sound FP8 may move a number."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from pytest_fp8.worker.restored import values_kept

if TYPE_CHECKING:
    from pytest_fp8.worker.engine import Engine

PERTURBATION = 2.0**-4
"""Weights are moved by a random factor within 1 +- this: 3.6 % in the mean, as much as e4m3 casts of both operands
change a product (28.6 dB)."""


@contextmanager
def moved_weights(engine: Engine, seed: int) -> Iterator[None]:
    """While open, the weights are moved; ``seed`` draws how. They are put back."""
    torch.manual_seed(seed)
    modules = dict(engine.model.named_modules())
    weights = {id(w): w for name in engine.originals if (w := modules[name]._parameters.get("weight")) is not None}
    with values_kept(weights.values()):
        with torch.no_grad():
            for weight in weights.values():
                noise = torch.rand_like(weight, dtype=torch.float32).mul_(2).sub_(1).mul_(PERTURBATION).add_(1)
                weight.copy_(weight * noise)
        yield


def first_losses(engine: Engine, seed: int, draws: int) -> list[float]:
    """The first loss of the curve of ``seed``, from its weights moved in as many ways as ``draws`` says."""
    losses: list[float] = []
    for draw in range(draws):
        engine.restart(seed)
        with moved_weights(engine, draw):
            batch = engine.training_batch(seed, step=0)
            engine.fault_points.before_step(engine, seed, step=0)
            losses.append(float(engine.step(batch)))
    return losses
