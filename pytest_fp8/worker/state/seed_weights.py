"""Gives a live, converted model the weights of a seed, or of a seed and moved a little, for a curve from step 0 on."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pytest_fp8.backends.base import FusedParams
from pytest_fp8.worker.tensors import assign, split
from pytest_fp8.worker.training.setup import SeedValues

JITTER = 608_135_816
"""Added to a seed, so that the factors are no numbers that a model draws."""
ROUNDING = 2.0**-8
"""About one unit in a weight's last BF16 place."""
SEEDS_APART = 1_000_003
"""Between the seeds of two weights, and of two draws, so that no factors are drawn twice."""


@torch.no_grad()
def copy_model(model: torch.nn.Module, fresh: SeedValues, fused: FusedParams, jitter: int | None) -> None:
    """Copy all parameters and buffers of ``fresh``, of an unconverted model, into ``model``. ``jitter``: as for
    :func:`copy_values`.

    Raises ``RuntimeError`` where ``model`` has a parameter that ``fresh`` does not have.
    """
    missing = copy_values(model, fresh[0], fused, jitter)
    if missing:
        raise RuntimeError(f"converted parameters that the fresh model does not have: {missing[:3]}")
    buffers = dict(model.named_buffers())
    for name, content in fresh[1].items():
        if name in buffers:
            buffers[name].copy_(content)


@torch.no_grad()
def copy_values(
    model: torch.nn.Module, values: Mapping[str, torch.Tensor], fused: FusedParams, jitter: int | None
) -> list[str]:
    """Copy ``values``, by plain names, into the model's parameters; gives the names that ``values`` does not have.

    ``jitter`` moves each weight by one rounding at most; the number is a seed.
    """
    live = dict(split(model.named_parameters(remove_duplicate=False), fused))
    for index, (name, value) in enumerate(values.items()):
        # A parameter that the conversion lost is reported by the layers question, from the ledger.
        target = live.pop(name, None)
        if target is None:
            continue
        if jitter is None:
            assign(target, value)
        else:
            # On the target's device, since a CPU takes seconds to draw a billion factors.
            assign(target, moved(value.to(target.device), JITTER + jitter + SEEDS_APART * index, ROUNDING))
    return sorted(live)


def moved(values: torch.Tensor, seed: int, by: float) -> torch.Tensor:
    """A copy in which each value is multiplied by a factor of its own within 1 +- ``by``. ``seed`` draws the factors,
    and no random generator of the arm is touched."""
    drawn = factors(values, seed, by)
    # In place: those of a whole embedding take twice its memory.
    return (drawn * values if values.is_complex() else drawn.mul_(values)).to(values.dtype)


def factors(values: torch.Tensor, seed: int, by: float) -> torch.Tensor:
    generator = torch.Generator(device=values.device).manual_seed(seed)
    return torch.rand(values.shape, generator=generator, device=values.device).mul_(2 * by).add_(1 - by)
