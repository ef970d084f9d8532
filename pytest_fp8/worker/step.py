"""Runs a hand-written training step: what it must do and give, and the step without its effect on the weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pytest_fp8.worker.phases import Seen, called, closure_of, follow, innermost, is_training_call
from pytest_fp8.zoo.training import Phase

Step = Callable[[torch.nn.Module, Any, torch.optim.Optimizer, Callable[[], Any]], Any]


class WorkloadError(ValueError):
    """A function of the workload gives something that nothing can be trained with."""

    def __init__(self, message: str, cause: str, next_step: str) -> None:
        super().__init__(message)
        self.fp8_cause, self.fp8_next = cause, next_step


class StepError(WorkloadError):
    """A hand-written step does not do what a training step does, or gives no loss."""


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
        raise StepError(
            f"the step {name_of(step)} must give its loss as a tensor with one element, it gave {described(loss)}",
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
            f"the step {name_of(step)} never went backward",
            "no loss.backward(): nothing is trained, and no gradient product can run in FP8",
            "call loss.backward() for each micro-batch, inside the step",
        )
    if not seen.stepped:
        raise StepError(
            f"the step {name_of(step)} never called optimizer.step()",
            "the optimizer it was given did not step: it was forgotten, another one stepped, or gradients are "
            "accumulated over several calls",
            "step the optimizer that the function is given, once all micro-batches of the batch have gone backward",
        )


@contextmanager
def muted(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """``optimizer.step()`` moves no weight inside, and a schedule at ``optimizer.scheduler`` is put back afterwards.

    For passes that need the step's forward and backward alone, on weights that must stay as they are. An optimizer that
    is given a closure holds both inside its step, as often as it likes: it steps, and what it moved is put back.
    """
    optimizer = innermost(optimizer)
    held = vars(optimizer).get("step")
    rates = [dict(group, params=None) for group in optimizer.param_groups]
    schedule = schedule_of(optimizer)
    before = schedule.state_dict() if schedule is not None else None

    real = optimizer.step

    def standing_still(*args: Any, **kwargs: Any) -> Any:
        if closure_of(args, kwargs) is None:
            return None
        with _put_back(optimizer):
            return real(*args, **kwargs)

    # A schedule looks for these two marks, and would warn.
    standing_still._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer._opt_called = True  # type: ignore[attr-defined]
    optimizer.step = standing_still  # type: ignore[method-assign]
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


@contextmanager
def _put_back(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Weights and optimizer state are afterwards what they were, wherever inside the optimizer's step it ends."""
    weights = [(p, p.detach().clone()) for group in optimizer.param_groups for p in group["params"]]
    state = {parameter: copy.deepcopy(entries) for parameter, entries in optimizer.state.items()}
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, weight in weights:
                parameter.copy_(weight)
        optimizer.state.clear()
        optimizer.state.update(state)


def schedule_of(optimizer: torch.optim.Optimizer) -> Any:
    """The learning-rate schedule that a workload's ``optimizer()`` hung on it, or ``None``."""
    return getattr(innermost(optimizer), "scheduler", None)


class _Enough(BaseException):
    """Ends a step once its first output is there; no user's ``except Exception`` holds it up."""


def first_output(
    step: Step, model: torch.nn.Module, batch: Any, optimizer: torch.optim.Optimizer, precision: Callable[[], Any]
) -> torch.Tensor:
    """What the model gives in the step's first forward pass that trains; evaluation before it does not count.

    Raises :class:`StepError` where the step goes backward, or ends, and has not called the model.
    """
    outputs: list[Any] = []

    @contextmanager
    def catch(result: list[Any]) -> Iterator[None]:
        training = is_training_call()
        yield
        if training:
            outputs.extend(result)
            raise _Enough

    def backward_without_a_call(_: None) -> torch.Tensor:
        raise _Enough

    nothing = torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, backward_without_a_call)
    try:
        with muted(optimizer), called(model, catch), nothing:
            step(model, batch, optimizer, precision)
    except _Enough:
        if outputs:
            return _tensor_of(outputs[0]).detach()
    raise StepError(
        f"the step {name_of(step)} never called the model itself, so that there is no output to compare",
        "it calls parts of the model or another method of it, as in model.encoder(...) or model.training_step(...), or "
        "it works on another object than the model it was given",
        "call model(...) in the step, with that work in the model's forward(); a wrapper around the model must be made "
        "in build() or convert()",
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
        raise TypeError(f"the model gave {described(output)}, in which there is no tensor to compare")
    return max(tensors, key=torch.Tensor.numel)


def name_of(function: Any) -> str:
    return f"{getattr(function, '__qualname__', type(function).__name__)}()"


def described(value: Any) -> str:
    """What a function gave, in the words of a message: ``nothing``, ``a float``, ``a tensor of shape (3,)``."""
    if value is None:
        return "nothing"
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, dict):
        return f"a dict with {', '.join(repr(key) for key in list(value)[:6]) or 'nothing in it'}"
    if isinstance(value, (list, tuple)):
        return f"a {type(value).__name__} of {', '.join(type(part).__name__ for part in value[:6]) or 'nothing'}"
    return f"a {type(value).__name__}"
