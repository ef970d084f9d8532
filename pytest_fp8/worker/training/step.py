"""Runs a hand-written training step; what it must do and return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pytest_fp8.said import WorkloadError
from pytest_fp8.worker.training.phases import StepCounts, follow
from pytest_fp8.zoo.training import LossFunction, Phase

Step = Callable[[torch.nn.Module, Any, torch.optim.Optimizer, Callable[[], Any]], Any]


class StepError(WorkloadError):
    """A hand-written step does not do what a training step does, or returns no loss."""


def run_step(
    step: Step,
    model: torch.nn.Module,
    batch: Any,
    optimizer: torch.optim.Optimizer,
    precision: Callable[[], Any],
    phase: Phase,
    on_gradients: Callable[[], None] | None = None,
) -> tuple[torch.Tensor, StepCounts]:
    """The step's loss, detached, and how often it went backward and stepped. Raises :class:`StepError`."""
    with follow(model, optimizer, phase, on_gradients) as seen:
        loss = step(model, batch, optimizer, precision)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise StepError("steps_no_loss", function=name_of(step), given=described(loss))
    return loss.detach().reshape(()), seen


def step_of_loss(loss_of: LossFunction) -> Step:
    """The step that trains with a loss function as :func:`pytest_fp8.zoo.training.training_step` does, to be followed
    as a hand-written one is."""

    def step(model: torch.nn.Module, batch: Any, optimizer: Any, precision: Callable[[], Any]) -> torch.Tensor:
        with precision():
            loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def require_whole(step: Step, loss: torch.Tensor, counts: StepCounts) -> None:
    """Raise :class:`StepError` where a step with a finite loss never went backward or never stepped.

    A step whose loss is not finite may well skip its optimizer, so it is not checked.
    """
    if not torch.isfinite(loss):
        return
    if not counts.backward:
        raise StepError("never_backward", function=name_of(step))
    if not counts.stepped:
        raise StepError("never_stepped", function=name_of(step))


def name_of(function: Any) -> str:
    """A function's name as messages show it: ``train_step()``."""
    return f"{getattr(function, '__qualname__', type(function).__name__)}()"


def described(value: Any) -> str:
    """What a function returned, as messages show it: ``nothing``, ``a float``, ``a tensor of shape (3,)``."""
    if value is None:
        return "nothing"
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, dict):
        return f"a dict with {', '.join(repr(key) for key in list(value)[:6]) or 'nothing in it'}"
    if isinstance(value, (list, tuple)):
        return f"a {type(value).__name__} of {', '.join(type(part).__name__ for part in value[:6]) or 'nothing'}"
    return f"a {type(value).__name__}"
