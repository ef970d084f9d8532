"""Moves weights, or what Linears are given, at random by as much as FP8 moves products."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from pytest_fp8.worker.tensors import change
from pytest_fp8.worker.training.restored import followed, hooked
from pytest_fp8.worker.training.zero import is_partitioned

if TYPE_CHECKING:
    from pytest_fp8.worker.run.engine import Engine

PERTURBATION = 2.0**-4
"""Weights are moved by a random factor within 1 +- this: 3.6 % in the mean, as much as e4m3 casts of both operands
change a product (28.6 dB)."""
SEEDS_APART = 1_000_003
"""Between the seeds of two weights, and of two draws, so that no factors are drawn twice."""


@contextmanager
def moved_weights(
    engine: Engine, seed: int, by: float = PERTURBATION, beside: Sequence[torch.nn.Module] = ()
) -> Iterator[Callable[[], None]]:
    """While open, the weights are moved, also those of modules ``beside`` the model; ``seed`` draws how, and no random
    generator of the arm is touched. They are put back at the end, or before, by what this gives: a training step goes
    forward and backward with moved weights, and its optimizer steps the arm's own. What an optimizer has changed by
    then stays changed."""
    modules = dict(engine.model.named_modules())
    moved = [modules[name] for name in engine.originals]
    moved += [each for module in beside for each in module.modules() if isinstance(each, torch.nn.Linear)]
    weights = {id(w): w for module in moved if (w := module._parameters.get("weight")) is not None}
    kept: list[tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]] = []

    @torch.no_grad()
    def put_back() -> None:
        while kept:
            change(*kept.pop())

    try:
        with torch.no_grad():
            for index, weight in enumerate(weights.values()):
                move = _Move(seed + SEEDS_APART * index, by, on_host=is_partitioned(weight))
                change(weight, move.made)
                kept.append((weight, move.undone))
        yield put_back
    finally:
        put_back()


class _Move:
    """Of one weight. The factors are drawn again to undo it, so that one copy of the weight is all that is kept."""

    def __init__(self, seed: int, by: float, on_host: bool) -> None:
        """``on_host``: keep the copy there, as of a weight that ZeRO-3 holds in parts and gives whole."""
        self._seed, self._by, self._on_host = seed, by, on_host
        self._before: torch.Tensor | None = None

    def made(self, values: torch.Tensor) -> torch.Tensor:
        self._before = values.cpu() if self._on_host else values.detach().clone()
        return self._moved(values)

    def undone(self, values: torch.Tensor) -> torch.Tensor:
        assert self._before is not None
        before = self._before.to(values.device)
        moved = self._moved(before)
        return torch.where(values == moved, before, before + (values - moved))

    def _moved(self, values: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator(device=values.device).manual_seed(self._seed)
        uniform = torch.rand(values.shape, generator=generator, device=values.device)
        return (values * _factors(uniform, self._by)).to(values.dtype)


def _factors(uniform: torch.Tensor, by: float = PERTURBATION) -> torch.Tensor:
    return uniform.mul_(2).sub_(1).mul_(by).add_(1)


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
    generator = torch.Generator(device=values.device).manual_seed(seed)
    # In the values' own type: autograd keeps the factors.
    return values * _factors(torch.rand(values.shape, generator=generator, device=values.device)).to(values.dtype)
