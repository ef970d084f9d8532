"""A training step: run and followed, its optimizer's schedule, and what enters and leaves the model in it."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import Any
from unittest.mock import patch

import torch
import torch.utils.checkpoint

from pytest_fp8.questions.layers.products import EVALUATION
from pytest_fp8.said import WorkloadError
from pytest_fp8.worker.training.restored import hooked, replaced_method
from pytest_fp8.zoo import data
from pytest_fp8.zoo.batch import tensors_in
from pytest_fp8.zoo.training import Phase

Call = Callable[..., Any]
Given = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and named arguments."""
Step = Callable[[torch.nn.Module, Any, torch.optim.Optimizer, Callable[[], Any]], Any]


def run_step(
    step: Step,
    model: torch.nn.Module,
    batch: Any,
    optimizer: torch.optim.Optimizer,
    precision: Callable[[], Any],
    phase: Phase,
    on_gradients: Callable[[], None] | None = None,
) -> tuple[torch.Tensor, Followed]:
    """The step's loss, detached, and what was seen of it. Raises :class:`WorkloadError`."""
    with follow(model, optimizer, phase, on_gradients) as seen:
        loss = step(model, batch, optimizer, precision)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise WorkloadError("no_loss", function=f"the step {name_of(step)}", given=described(loss))
    return loss.detach().reshape(()), seen


def require_whole(step: Step, loss: torch.Tensor, seen: Followed) -> None:
    """Raise :class:`WorkloadError` where a step with a finite loss never went backward or never stepped.

    A step whose loss is not finite may well skip its optimizer, so it is not checked.
    """
    if not torch.isfinite(loss):
        return
    if not seen.backward:
        raise WorkloadError("never_backward", function=name_of(step))
    if not seen.stepped:
        raise WorkloadError("never_stepped", function=name_of(step))


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


# -- what of a step is forward, backward, optimizer or evaluation ------------------------------------------------------


@contextmanager
def follow(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    phase: Phase,
    on_gradients: Callable[[], None] | None = None,
) -> Iterator[Followed]:
    """Open ``phase`` around each part of the step that runs inside, however often the parts alternate.

    What runs inside ``backward()`` is backward, what runs inside ``optimizer.step()`` is optimizer, a call of the model
    without gradients is evaluation, and all else is forward, also the closure that an optimizer is given and calls
    inside its step. ``on_gradients`` runs before each optimizer step, or after each call of its closure.
    """
    step = Followed(phase, on_gradients or (lambda: None))
    try:
        with (
            on_steps(optimizer, step.before_step, lambda: step.enter("forward")),
            around_backward(step.go_backward),
            called(model, step.call),
        ):
            step.enter("forward")
            yield step
    finally:
        step.opened.close()


class Followed:
    """A step that runs: the part of it that is open now, at most one, and how often it went backward and stepped."""

    def __init__(self, phase: Phase, on_gradients: Callable[[], None]) -> None:
        self._phase, self._on_gradients = phase, on_gradients
        self.opened, self.name = ExitStack(), ""
        self.backward = self.stepped = 0

    def enter(self, name: str) -> None:
        self.opened.close()
        self.name = name
        self.opened.enter_context(self._phase(name))

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        outer = self.name
        self.enter(name)
        try:
            yield
        finally:
            self.enter(outer)

    def call(self, inner: Call, args: Any, kwargs: Any) -> Any:
        # Only from the forward part: in the backward part reentrant checkpointing may call a whole model again.
        evaluates = self.name == "forward" and not is_training_call()
        with self.inside(EVALUATION) if evaluates else nullcontext():
            return inner(*args, **kwargs)

    @contextmanager
    def go_backward(self) -> Iterator[None]:
        self.backward += 1
        with self.inside("backward"):
            yield

    def before_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given | None:
        self.stepped += 1
        closure = closure_of(args, kwargs)
        if closure is None:
            self._on_gradients()
            self.enter("optimizer")
            return None

        def followed() -> Any:
            with self.inside("forward"):
                loss = closure()
            self._on_gradients()
            return loss

        self.enter("optimizer")
        return ((followed, *args[1:]), kwargs) if args else (args, {**kwargs, "closure": followed})


@contextmanager
def around_backward(around: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Open ``around`` for each backward pass, also for one inside another."""

    def within(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with around():
                return real(*args, **kwargs)

        return call

    # Tensor.backward looks the function up in this module at each call.
    home = torch.autograd
    with patch.object(home, "backward", within(home.backward)), patch.object(home, "grad", within(home.grad)):
        yield


def called(model: torch.nn.Module, instead: Callable[[Call, Any, Any], Any]) -> AbstractContextManager[Any]:
    """``instead(call, args, kwargs)`` in place of each call of the model.

    Not by hooks: those of a model that is compiled whole run inside its compiled code, and a hook that is new in each
    step would have it compiled again.
    """
    # Private: without ``model.compile()`` a module has no public place for another call.
    inner = model._compiled_call_impl or model._call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        return instead(inner, args, kwargs)

    return patch.object(model, "_compiled_call_impl", call)


def is_training_call() -> bool:
    """Whether a call of the model that begins now trains: it has gradients, or it is reentrant checkpointing's first
    pass over the whole model, which is computed again with gradients."""
    if torch.is_grad_enabled():
        return True
    first_pass = inspect.unwrap(torch.utils.checkpoint.CheckpointFunction.forward)
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is getattr(first_pass, "__code__", None):
            return True
        frame = frame.f_back
    return False


# -- steps of the optimizer -------------------------------------------------------------------------------------------


@contextmanager
def on_steps(
    optimizer: Any,
    before: Callable[[tuple[Any, ...], dict[str, Any]], Given | None],
    after: Callable[[], None] = lambda: None,
) -> Iterator[None]:
    """Call ``before`` with the arguments of each step, which may give others in their place, and ``after`` at its end:
    once, also where a step calls that of its base class or of an optimizer that it holds.

    A step that is muted runs no hooks, and one that the user looked up earlier, ``step = optimizer.step``, runs them
    alone. So steps are seen by both.
    """
    under_way = 0

    def enter(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
        nonlocal under_way
        under_way += 1
        return (before(args, kwargs) if under_way == 1 else None) or (args, kwargs)

    def leave(*_: Any) -> None:
        nonlocal under_way
        under_way -= 1
        if not under_way:
            after()

    def step(real: Call, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = enter(args, kwargs)
        try:
            return real(*args, **kwargs)
        finally:
            leave()

    def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
        given, named = enter(args[1:], kwargs)
        return (args[0], *given), named

    every = optimizers_of(optimizer)
    handles = [each.register_step_pre_hook(hook) for each in every]
    handles += [each.register_step_post_hook(leave) for each in every]
    with hooked(handles), replaced_method(every[0], "step", step):
        yield


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """The closure among the arguments of ``optimizer.step(closure)``: forward and backward pass of the step, which an
    optimizer such as LBFGS runs as often as it needs them."""
    closure = args[0] if args else kwargs.get("closure")
    return closure if callable(closure) else None


def innermost(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer itself, without what a library wraps around it (Accelerate's AcceleratedOptimizer)."""
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    return optimizer  # type: ignore[no-any-return]


def optimizers_of(optimizer: Any) -> list[torch.optim.Optimizer]:
    """The optimizer and those that it holds: the step of SAM is its base optimizer's."""
    inner = innermost(optimizer)
    return [inner, *(held for held in vars(inner).values() if isinstance(held, torch.optim.Optimizer))]


# -- the learning-rate schedule and the settings of groups -------------------------------------------------------------


def schedule_of(optimizer: torch.optim.Optimizer) -> Any:
    """The learning-rate schedule that a workload's ``optimizer()`` set as ``optimizer.scheduler``, or ``None``."""
    return getattr(innermost(optimizer), "scheduler", None)


def step_schedule(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    """Step the schedule, where there is one, as a training loop does: once, and with the loss where it goes by that."""
    schedule = schedule_of(optimizer)
    if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
        schedule.step(loss)
    elif schedule is not None:
        schedule.step()


def settings_now(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """What puts the schedule at ``optimizer.scheduler`` and the groups back to what they are now. A group that was
    added since is taken out: a step that unfreezes layers adds it again."""
    optimizer, schedule = innermost(optimizer), schedule_of(optimizer)
    settings = [copy.deepcopy(dict(group, params=None)) for group in optimizer.param_groups]
    before = schedule_state(schedule)

    def put_back() -> None:
        load_schedule_state(schedule, before)
        del optimizer.param_groups[len(settings) :]
        for group, old in zip(optimizer.param_groups, settings, strict=False):
            for key in old.keys() - {"params"}:
                # Compiled code holds a rate that is a tensor.
                if isinstance(old[key], torch.Tensor) and isinstance(group.get(key), torch.Tensor):
                    group[key].copy_(old[key])
                else:
                    group[key] = copy.deepcopy(old[key])

    return put_back


def schedule_state(schedule: Any) -> dict[str, Any]:
    """A copy of what a schedule keeps. One of the user's own may have no ``state_dict()``: then its attributes that are
    numbers, text, or lists and dicts of these. Others are its optimizer and the optimizer's groups."""
    if hasattr(schedule, "state_dict"):
        return copy.deepcopy(schedule.state_dict())
    held = vars(schedule) if hasattr(schedule, "__dict__") else {}
    return {key: copy.deepcopy(value) for key, value in held.items() if _is_data(value)}


def load_schedule_state(schedule: Any, state: dict[str, Any]) -> None:
    """Put what :func:`schedule_state` gave into the schedule."""
    if hasattr(schedule, "load_state_dict"):
        schedule.load_state_dict(copy.deepcopy(state))
    elif state:
        vars(schedule).update(copy.deepcopy(state))


def _is_data(value: Any) -> bool:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
    return all(part is None or isinstance(part, (int, float, str)) for part in parts)


# -- what a model gives, whatever it is made of, and what enters it ----------------------------------------------------


def tensor_of(output: Any) -> torch.Tensor | None:
    """The tensor to compare: the output itself, its logits, or its largest tensor of floating-point numbers."""
    if isinstance(output, torch.Tensor):
        return output
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if isinstance(logits, torch.Tensor):
        return logits
    tensors = list(tensors_in(output))
    floating = [tensor for tensor in tensors if tensor.is_floating_point()]
    return max(floating or tensors, key=torch.Tensor.numel, default=None)


@contextmanager
def inputs_noted(model: torch.nn.Module) -> Iterator[list[int]]:
    """A fingerprint of the tensors that enter the model, for each of its calls that trains."""
    noted: list[int] = []

    def note(args: Any, kwargs: Any) -> None:
        with torch.no_grad():
            noted.append(data.fingerprint([args, kwargs]))

    with on_training_calls(model, note):
        yield noted


def on_training_calls(model: torch.nn.Module, note: Callable[[Any, Any], None]) -> AbstractContextManager[Any]:
    """Call ``note`` with the arguments of each call of the model that trains."""

    def call(inner: Call, args: Any, kwargs: Any) -> Any:
        if is_training_call():
            note(args, kwargs)
        return inner(*args, **kwargs)

    return called(model, call)


def output_of(model: torch.nn.Module, run: Callable[[], torch.Tensor]) -> torch.Tensor:
    """What the model gives, detached, in the first call that trains, at which the run ends. Where none does, that of
    the first call without gradients: some steps run the model once for the loss and once more, in parts, for the
    gradients. Where parts of the model are called alone, or what it gives has no tensor, what ``run`` gives: a loss."""
    trained: list[Any] = []
    others: list[Any] = []

    def catch(inner: Call, args: Any, kwargs: Any) -> Any:
        training = is_training_call()
        result = inner(*args, **kwargs)
        (trained if training else others).append(result)
        if training:
            raise Enough
        return result

    with suppress(Enough), called(model, catch):
        others.append(run())
    found = tensor_of((trained or others)[0])
    return (run() if found is None else found).detach()


class Enough(BaseException):
    """Ends a run once its first output is there. A user's ``except Exception`` does not catch a BaseException."""
