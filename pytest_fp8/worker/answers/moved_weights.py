"""The weights of all Linears moved at random by as much as FP8 moves products: how far sound FP8 may move a number."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from statistics import mean
from typing import TYPE_CHECKING, Any

import torch

from pytest_fp8.worker.answers.held_out import compared, held_out_output
from pytest_fp8.worker.state.shards import change, parts_kept
from pytest_fp8.worker.training.restored import hooked

if TYPE_CHECKING:
    from pytest_fp8.worker.run.engine import Engine

PERTURBATION = 2.0**-4
"""Weights are moved by a random factor within 1 +- this: 3.6 % in the mean, as much as e4m3 casts of both operands
change a product (28.6 dB)."""


@contextmanager
def moved_weights(engine: Engine, seed: int) -> Iterator[None]:
    """While open, the weights are moved; ``seed`` draws how. They are put back."""
    torch.manual_seed(seed)
    modules = dict(engine.model.named_modules())
    weights = {id(w): w for name in engine.originals if (w := modules[name]._parameters.get("weight")) is not None}
    with parts_kept(weights.values()):
        with torch.no_grad():
            for weight in weights.values():
                change(weight, _moved)
        yield


def _moved(values: torch.Tensor) -> torch.Tensor:
    noise = torch.rand_like(values, dtype=torch.float32).mul_(2).sub_(1).mul_(PERTURBATION).add_(1)
    return values * noise


@contextmanager
def moved_products(engine: Engine, seed: int) -> Iterator[None]:
    """While open, each value of each Linear's output is moved by a factor of its own, and in the backward pass the
    gradient that arrives there with it. Runs uncompiled.

    FP8 rounds each row on its own. Moved weights move all rows alike, and what cancels between rows, as between the
    choices that a softmax compares, still cancels.
    """
    generator = torch.Generator(device=engine.device).manual_seed(seed)
    modules = dict(engine.model.named_modules())

    def move(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not isinstance(output, torch.Tensor):
            return output
        noise = torch.rand(output.shape, generator=generator, device=output.device)
        return output * noise.mul_(2).sub_(1).mul_(PERTURBATION).add_(1).to(output.dtype)

    handles = [modules[name].register_forward_hook(move) for name in engine.originals]
    with hooked(handles), torch.compiler.set_stance("force_eager"):
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


def moved_outputs(engine: Engine, seed: int, draws: int) -> list[float]:
    """How far the output on a held-out batch is from that of the arm's weights when these are moved in as many ways as
    ``draws`` says: relative L2 distances."""
    output = compared(held_out_output(engine, seed)[0])
    length = float(output.norm()) or 1.0
    distances: list[float] = []
    for draw in range(draws):
        with moved_weights(engine, draw):
            distances.append(float((compared(held_out_output(engine, seed)[0]) - output).norm()) / length)
    return distances


def moved_resumes(engine: Engine, seed: int, first_step: int, steps: int, draws: int) -> list[float]:
    """How far the mean loss of ``steps`` training steps after the first ones moves when the weights that these left are
    moved, in as many ways as ``draws`` says; the first number is without that."""
    means: list[float] = []
    for draw in range(-1, draws):
        engine.curve(seed, first_step)
        with moved_weights(engine, draw) if draw >= 0 else nullcontext():
            means.append(mean(engine.curve(seed, steps, first_step=first_step)["losses"]))
    return [each - means[0] for each in means[1:]]
