"""Runs a hand-written training step: what it must do and return, and the step without its effect on the weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from pytest_fp8.said import WorkloadError
from pytest_fp8.worker.training.model_output import Enough, first_call, tensor_of
from pytest_fp8.worker.training.phases import StepCounts, closure_of, follow, has_hooks, innermost, optimizers_of
from pytest_fp8.worker.training.restored import replaced_method, values_kept
from pytest_fp8.worker.training.schedule import schedule_kept
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


@contextmanager
def muted(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """``optimizer.step()`` changes no weight inside, and a schedule at ``optimizer.scheduler`` is restored afterwards.

    For passes that need only the step's forward and backward, on weights that must stay as they are. An optimizer that
    is given a closure runs both inside its step, and a loop may have looked ``optimizer.step`` up before: these do
    step, and weights and state are restored afterwards.
    """
    stepped: set[int] = set()
    with ExitStack() as stack:
        stack.callback(innermost(optimizer).zero_grad, set_to_none=True)
        stack.enter_context(schedule_kept(optimizer))
        for one in optimizers_of(optimizer):

            def before(real: torch.optim.Optimizer, *_: Any) -> None:
                if id(real) not in stepped:
                    stepped.add(id(real))
                    stack.enter_context(_restored(real))

            if has_hooks(one):
                stack.callback(one.register_step_pre_hook(before).remove)
            # torch's schedules look for it and warn without it.
            one._opt_called = True  # type: ignore[attr-defined]
            stack.enter_context(replaced_method(one, "step", _unless_closure))
        yield


def _unless_closure(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return None if closure_of(args, kwargs) is None else real(*args, **kwargs)


@contextmanager
def _restored(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Restore weights and optimizer state afterwards, also where the optimizer's step raises."""
    state = {parameter: copy.deepcopy(entries) for parameter, entries in optimizer.state.items()}
    try:
        with values_kept(p for group in optimizer.param_groups for p in group["params"]):
            yield
    finally:
        optimizer.state.clear()
        optimizer.state.update(state)


@contextmanager
def forward_alone(optimizer: torch.optim.Optimizer, started: list[Any] | None = None) -> Iterator[None]:
    """A step inside ends where it goes backward, and changes no weight. ``started``: takes what it goes backward
    from."""

    def backward(_: Any, *args: Any, **kwargs: Any) -> Any:
        if started is not None and (args or kwargs):
            started.append(args[0] if args else next(iter(kwargs.values())))
        raise Enough

    # Tensor.backward looks the function up in this module at each call.
    home = torch.autograd
    # Nothing is saved for a backward pass, and one that was looked up before ends all the same.
    nothing = torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, backward)
    with (
        muted(optimizer),
        replaced_method(home, "backward", backward),
        replaced_method(home, "grad", backward),
        nothing,
    ):
        yield


def first_output(
    step: Step, model: torch.nn.Module, batch: Any, optimizer: torch.optim.Optimizer, precision: Callable[[], Any]
) -> torch.Tensor:
    """The model's output in the step's first forward pass that trains. Where none does before the step first goes
    backward, that of the first one without gradients: some steps run the model once for the loss and once more, in
    parts, for the gradients. Where the step calls parts or methods of the model alone, what it goes backward from.

    Raises :class:`StepError` where the step ends without either.
    """
    without_gradients: list[Any] = []
    started: list[Any] = []
    with forward_alone(optimizer, started):
        calls = first_call(model, lambda: step(model, batch, optimizer, precision), without_gradients)
    if calls := calls or without_gradients or started:
        output = tensor_of(calls[0])
        if output is None:
            raise TypeError(f"the model gave {described(calls[0])}, which has no tensor to compare")
        return output.detach()
    raise StepError("passed_by", function=name_of(step))


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
