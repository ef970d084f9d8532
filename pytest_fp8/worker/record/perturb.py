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
from pytest_fp8.worker.training.restored import around, hooked

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

    def moved(name: str, values: Any) -> Any:
        if not (isinstance(values, torch.Tensor) and values.is_floating_point()):
            return values
        return _moved_values(values, _seed_of(values, f"{seed} {name}"))

    def before(name: str) -> Callable[..., Any]:
        def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return tuple(moved(name, each) for each in args), {key: moved(name, kwargs[key]) for key in kwargs}

        return hook

    def after(name: str) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if isinstance(output, torch.Tensor) and output.requires_grad:
                output.register_hook(partial(moved, name))

        return hook

    handles = around({name: modules[name] for name in engine.originals}, before, after)
    with hooked(handles), torch.compiler.set_stance("force_eager"):
        yield


class _MovedValues(torch.autograd.Function):
    """Values moved. The factors are drawn again for the gradient: kept ones would take twice what the values take."""

    @staticmethod
    def forward(values: torch.Tensor, seed: int) -> torch.Tensor:
        generator = torch.Generator(device=values.device).manual_seed(seed)
        factors = _factors(torch.rand(values.shape, generator=generator, device=values.device))
        return (values * factors).to(values.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, int], output: torch.Tensor) -> None:
        ctx.seed = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _moved_values(gradient, ctx.seed), None


def _moved_values(values: torch.Tensor, seed: int) -> torch.Tensor:
    moved: torch.Tensor = _MovedValues.apply(values, seed)  # type: ignore[no-untyped-call]
    return moved


def _seed_of(values: torch.Tensor, where: str) -> int:
    """By what the values are: what activation checkpointing recomputes is moved as it was, or a router would send rows
    elsewhere then; and other values, as another choice's, are moved in another way."""
    return zlib.crc32(f"{where} {float(values.detach().sum(dtype=torch.float64))}".encode())
