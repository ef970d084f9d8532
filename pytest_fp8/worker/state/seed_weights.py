"""Gives a live, converted model the weights of a seed, for a curve that starts again at step 0."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pytest_fp8.backends.base import FusedParams
from pytest_fp8.worker.tensors import assign, is_part, is_plain, split
from pytest_fp8.worker.training.setup import SeedValues

JITTER = 608_135_816
"""Added to a seed, so that the factors are no numbers that a model draws."""
PART = 1 << 24
"""Elements of a weight whose factors are drawn at once."""


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

    ``jitter`` multiplies each weight by a random factor within 1 +- 2^-8, about one unit in its last BF16 place; the
    number is a seed.
    """
    if jitter is not None:
        # A build() that seeds torch for itself would leave all seeds one and the same factors.
        torch.manual_seed(JITTER + jitter)
    live = dict(split(model.named_parameters(remove_duplicate=False), fused))
    for name, value in values.items():
        # A parameter that the conversion lost is reported by the layers question, from the ledger.
        target = live.pop(name, None)
        if target is None:
            continue
        if jitter is None:
            assign(target, value)
        else:
            _assign_moved(target, value)
    return sorted(live)


def _assign_moved(target: torch.Tensor, value: torch.Tensor) -> None:
    """On the target's device, since a CPU takes seconds to draw a billion factors; into a plain tensor part by part,
    since the factors of a whole embedding take twice its memory."""
    value = value.to(target.device)
    # ZeRO-3 leaves small weights whole and keeps master weights of them beside.
    plain = all(is_plain(each) and each.is_contiguous() and not is_part(each) for each in (target, value))
    if not plain or target.shape != value.shape:
        assign(target, value * _noise(value))
        return
    for into, part in zip(target.view(-1).split(PART), value.view(-1).split(PART), strict=True):
        into.copy_(part * _noise(part))


def _noise(value: torch.Tensor) -> torch.Tensor:
    return torch.rand_like(value, dtype=torch.float32).mul_(2).sub_(1).mul_(2.0**-8).add_(1)
