"""Runs a hand-written training step: what it must do and give, and the step without its effect on the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pytest_fp8.arms.phases import Seen, called, follow, innermost
from pytest_fp8.zoo.training import Phase

Step = Callable[[torch.nn.Module, Any, torch.optim.Optimizer, Callable[[], Any]], Any]


class StepError(ValueError):
    """A hand-written step does not do what a training step does, or gives no loss."""

    def __init__(self, message: str, cause: str, next_step: str) -> None:
        super().__init__(message)
        self.fp8_cause, self.fp8_next = cause, next_step


def run_step(
    step: Step,
    model: torch.nn.Module,
    batch: Any,
    optimizer: torch.optim.Optimizer,
    precision: Callable[[], Any],
    phase: Phase,
    on_gradients: Callable[[], None] | None = None,
) -> tuple[torch.Tensor, Seen]:
    """The step's loss, detached, and how often it went backward and stepped. Raises :class:`StepError`."""
    with follow(model, optimizer, phase, on_gradients) as seen:
        loss = step(model, batch, optimizer, precision)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        given = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else _a(loss)
        raise StepError(
            f"the step {_name(step)} must give its loss as a tensor with one element, it gave {given}",
            "a float waits for the GPU in every step, which no timing should hold; nothing leaves no loss to compare",
            "return loss.detach(), the mean over the micro-batches",
        )
    return loss.detach().reshape(()), seen


def require_whole(step: Step, loss: torch.Tensor, seen: Seen) -> None:
    """Raise :class:`StepError` where a step with a finite loss never went backward or never stepped.

    One that is not finite is left alone: a step that then skips its optimizer is a careful one.
    """
    if not torch.isfinite(loss):
        return
    if not seen.backward:
        raise StepError(
            f"the step {_name(step)} never went backward",
            "no loss.backward(): nothing is trained, and no gradient product can run in FP8",
            "call loss.backward() for each micro-batch, inside the step",
        )
    if not seen.stepped:
        raise StepError(
            f"the step {_name(step)} never called optimizer.step()",
            "the optimizer it was given did not step: it was forgotten, another one stepped, or gradients are "
            "accumulated over several calls",
            "step the optimizer that the function is given, once all micro-batches of the batch have gone backward",
        )


@contextmanager
def muted(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """``optimizer.step()`` does nothing inside, and a schedule at ``optimizer.scheduler`` is put back afterwards.

    For passes that need the step's forward and backward alone, on weights that must stay as they are.
    """
    optimizer = innermost(optimizer)
    held = vars(optimizer).get("step")
    rates = [dict(group, params=None) for group in optimizer.param_groups]
    schedule = schedule_of(optimizer)
    before = schedule.state_dict() if schedule is not None else None

    def nothing(*_: Any, **__: Any) -> None:
        return None

    # A schedule looks for these two marks, and would warn.
    nothing._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer._opt_called = True  # type: ignore[attr-defined]
    optimizer.step = nothing  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        if held is None:
            del optimizer.step
        else:
            optimizer.step = held  # type: ignore[method-assign]
        if schedule is not None:
            schedule.load_state_dict(before)
        for group, old in zip(optimizer.param_groups, rates, strict=True):
            group.update({key: value for key, value in old.items() if key != "params"})
        optimizer.zero_grad(set_to_none=True)


def schedule_of(optimizer: torch.optim.Optimizer) -> Any:
    """The learning-rate schedule that a workload's ``optimizer()`` hung on it, or ``None``."""
    return getattr(innermost(optimizer), "scheduler", None)


class _Enough(BaseException):
    """Ends a step once its first output is there; no user's ``except Exception`` holds it up."""


def first_output(
    step: Step, model: torch.nn.Module, batch: Any, optimizer: torch.optim.Optimizer, precision: Callable[[], Any]
) -> torch.Tensor:
    """What the model gives in the step's first forward pass that trains; evaluation before it does not count."""
    outputs: list[Any] = []

    @contextmanager
    def catch(result: list[Any]) -> Iterator[None]:
        training = torch.is_grad_enabled()
        yield
        if training:
            outputs.extend(result)
            raise _Enough

    nothing = torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, lambda none: none)
    try:
        with muted(optimizer), called(model, catch), nothing:
            step(model, batch, optimizer, precision)
    except _Enough:
        return _tensor_of(outputs[0]).detach()
    raise StepError(
        f"the step {_name(step)} never called the model",
        "it works on another object than the model it was given",
        "call model(...) in the step; a wrapper around it must be made in build() or convert()",
    )


def _tensor_of(output: Any) -> torch.Tensor:
    """The tensor that an output is: itself, its logits, or the first large one of a tuple or dict."""
    if isinstance(output, torch.Tensor):
        return output
    logits = getattr(output, "logits", None)
    if isinstance(logits, torch.Tensor):
        return logits
    parts = output.values() if isinstance(output, dict) else output if isinstance(output, (list, tuple)) else ()
    tensors = [part for part in parts if isinstance(part, torch.Tensor)]
    if not tensors:
        raise TypeError(f"the model gave {_a(output)}, in which there is no tensor to compare")
    return max(tensors, key=torch.Tensor.numel)


def _name(function: Any) -> str:
    return f"{getattr(function, '__qualname__', type(function).__name__)}()"


def _a(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"
