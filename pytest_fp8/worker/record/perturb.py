"""Moves weights, or what Linears are given, at random by as much as FP8 moves products."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from pytest_fp8.worker.state.snapshot import values_kept
from pytest_fp8.worker.tensors import change
from pytest_fp8.worker.training.restored import followed, hooked

if TYPE_CHECKING:
    from pytest_fp8.worker.run.engine import Engine

PERTURBATION = 2.0**-4
"""Weights are moved by a random factor within 1 +- this: 3.6 % in the mean, as much as e4m3 casts of both operands
change a product (28.6 dB)."""


@contextmanager
def moved_weights(
    engine: Engine, seed: int, by: float = PERTURBATION, beside: Sequence[torch.nn.Module] = ()
) -> Iterator[None]:
    """While open, the weights are moved, also those of modules ``beside`` the model; ``seed`` draws how. They are put
    back."""
    torch.manual_seed(seed)
    modules = dict(engine.model.named_modules())
    moved = [modules[name] for name in engine.originals]
    moved += [each for module in beside for each in module.modules() if isinstance(each, torch.nn.Linear)]
    weights = {id(w): w for module in moved if (w := module._parameters.get("weight")) is not None}
    with values_kept(weights.values()):
        with torch.no_grad():
            for weight in weights.values():
                change(weight, partial(_moved, by=by))
        yield


def _moved(values: torch.Tensor, by: float) -> torch.Tensor:
    return values * _factors(torch.rand_like(values, dtype=torch.float32), by)


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
