"""The weights of a live, converted model: those of a seed, and moved at random, by one rounding or by as much as FP8
moves products. So is what Linears are given."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from pytest_fp8.backends.linears import weight_of
from pytest_fp8.worker.tensors import held, parameters, plain_name
from pytest_fp8.worker.training.restored import followed, hooked

JITTER = 608_135_816
"""Added to a seed, so that the factors are no numbers that a model draws."""
ROUNDING = 2.0**-8
"""About one unit in a weight's last BF16 place."""
SEEDS_APART = 1_000_003
"""Between the seeds of two weights, and of two draws, so that no factors are drawn twice."""
PERTURBATION = 2.0**-4
"""Weights are moved by a random factor within 1 +- this: 3.6 % in the mean, as much as e4m3 casts of both operands
change a product (28.6 dB)."""


@torch.no_grad()
def copy_values(
    model: torch.nn.Module,
    values: Mapping[str, torch.Tensor],
    jitter: int | None,
    buffers: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> list[str]:
    """Copy ``values`` and ``buffers``, of an unconverted model, into the model's; gives the plain names of parameters
    that ``values`` does not have.

    ``jitter`` moves each weight by one rounding at most; the number is a seed.
    """
    live = parameters(model)
    for index, (name, value) in enumerate(values.items()):
        # A parameter that the conversion lost is reported by the layers question, from the ledger.
        target = live.pop(plain_name(name), None)
        if target is None:
            continue
        if jitter is None:
            held(target).fill(value)
        else:
            # On the target's device, since a CPU takes seconds to draw a billion factors.
            held(target).fill(moved(value.to(target.device), JITTER + jitter + SEEDS_APART * index, ROUNDING))
    there = dict(model.named_buffers())
    for name, content in buffers.items():
        if name in there:
            there[name].copy_(content)
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


@contextmanager
def moved_weights(engine: Any, seed: int, by: float = PERTURBATION) -> Iterator[Callable[[], None]]:
    """While open, the weights of all Linears are moved; ``seed`` draws how. They are put back at the end, or before, by
    what this gives: a training step goes forward and backward with moved weights, and its optimizer steps the arm's
    own. What an optimizer has changed by then stays changed."""
    modules = dict(engine.model.named_modules())
    linears = [modules[name] for name in engine.originals]
    weights = {id(w): w for module in linears if (w := weight_of(module)) is not None}
    undo: list[Callable[[], None]] = []

    def put_back() -> None:
        while undo:
            undo.pop()()

    try:
        for index, weight in enumerate(weights.values()):
            undo.append(_move(weight, seed + SEEDS_APART * index, by))
        yield put_back
    finally:
        put_back()


def _move(weight: torch.Tensor, seed: int, by: float) -> Callable[[], None]:
    """Move one weight; gives what takes it back. The factors are drawn again for that, so that one copy of the weight
    is all that is kept."""
    copy = held(weight).copied()

    def take_back(values: torch.Tensor) -> torch.Tensor:
        before = held(copy).local().to(values.device)
        then = moved(before, seed, by)
        return torch.where(values == then, before, before + (values - then))

    held(weight).change(partial(moved, seed=seed, by=by))
    return partial(held(weight).change, take_back)


@contextmanager
def moved_operands(engine: Any, seed: int) -> Iterator[None]:
    """While open, each value that a Linear is given is moved, and in the backward pass each value of the gradient that
    arrives at its output: what FP8 rounds besides weights. Runs uncompiled.

    Moved weights move all rows alike, and what cancels between rows, as between the choices that a softmax compares,
    still cancels. FP8 rounds each row on its own.
    """
    modules = dict(engine.model.named_modules())
    handles = followed(modules[name] for name in engine.originals)
    for name in engine.originals:
        move = partial(_moved_by_itself, where=f"{seed} {name}")
        handles.append(modules[name].register_forward_pre_hook(partial(_move_given, move), with_kwargs=True))
        handles.append(modules[name].register_forward_hook(partial(_move_gradient, move)))
    with hooked(handles), torch.compiler.set_stance("force_eager"):
        yield


def _move_given(move: Callable[[Any], Any], _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return tuple(map(move, args)), {key: move(value) for key, value in kwargs.items()}


def _move_gradient(move: Callable[[Any], Any], _: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
    if isinstance(output, torch.Tensor) and output.requires_grad:
        output.register_hook(move)


def _moved_by_itself(values: Any, where: str) -> Any:
    """By factors that follow from the values: what activation checkpointing recomputes is moved as it was, or a router
    would send rows elsewhere then; and other values, as another choice's, are moved in another way."""
    if not (isinstance(values, torch.Tensor) and values.is_floating_point()):
        return values
    seed = zlib.crc32(f"{where} {float(values.detach().sum(dtype=torch.float64))}".encode())
    # In the values' own type: autograd keeps the factors.
    return values * factors(values, seed, PERTURBATION).to(values.dtype)
