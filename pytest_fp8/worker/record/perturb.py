"""Moves weights, or what Linears are given, at random by as much as FP8 moves products."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from pytest_fp8.worker.state.seed_weights import SEEDS_APART, factors, moved
from pytest_fp8.worker.tensors import change, is_partitioned
from pytest_fp8.worker.training.restored import followed, hooked

if TYPE_CHECKING:
    from pytest_fp8.worker.run.engine import Engine

PERTURBATION = 2.0**-4
"""Weights are moved by a random factor within 1 +- this: 3.6 % in the mean, as much as e4m3 casts of both operands
change a product (28.6 dB)."""


@contextmanager
def moved_weights(
    engine: Engine, seed: int, by: float = PERTURBATION, beside: Sequence[torch.nn.Module] = ()
) -> Iterator[Callable[[], None]]:
    """While open, the weights of all Linears are moved, also those of modules ``beside`` the model; ``seed`` draws how.
    They are put back at the end, or before, by what this gives: a training step goes forward and backward with moved
    weights, and its optimizer steps the arm's own. What an optimizer has changed by then stays changed."""
    modules = dict(engine.model.named_modules())
    linears = [modules[name] for name in engine.originals]
    linears += [each for module in beside for each in module.modules() if isinstance(each, torch.nn.Linear)]
    weights = {id(w): w for module in linears if (w := module._parameters.get("weight")) is not None}
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
    is all that is kept: on the host, where ZeRO-3 holds it in parts and gives the whole."""
    kept: list[torch.Tensor] = []

    def move(values: torch.Tensor) -> torch.Tensor:
        kept.append(values.cpu() if is_partitioned(weight) else values.detach().clone())
        return moved(values, seed, by)

    def take_back(values: torch.Tensor) -> torch.Tensor:
        before = kept.pop().to(values.device)
        then = moved(before, seed, by)
        return torch.where(values == then, before, before + (values - then))

    change(weight, move)
    return partial(change, weight, take_back)


@contextmanager
def moved_operands(engine: Engine, seed: int) -> Iterator[None]:
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
