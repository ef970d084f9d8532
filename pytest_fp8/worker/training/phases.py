"""Follows a hand-written training step: what of it is forward, backward, optimizer or evaluation."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.checkpoint

from pytest_fp8.questions.layers.products import EVALUATION
from pytest_fp8.worker.training.restored import hooked, replaced, replaced_method
from pytest_fp8.zoo.training import Phase

Call = Callable[..., Any]


@dataclass
class StepCounts:
    """How often one step went backward, and how often its optimizer stepped."""

    backward: int = 0
    stepped: int = 0


@contextmanager
def follow(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    phase: Phase,
    on_gradients: Callable[[], None] | None = None,
) -> Iterator[StepCounts]:
    """Open ``phase`` around each part of the step that runs inside, however often the parts alternate.

    What runs inside ``backward()`` is backward, what runs inside ``optimizer.step()`` is optimizer, a call of the model
    without gradients is evaluation, and all else is forward, also the closure that an optimizer is given and calls
    inside its step. ``on_gradients`` runs before each optimizer step, or after each call of its closure.
    """
    parts, counts = _Parts(phase), StepCounts()

    @contextmanager
    def call(*_: Any) -> Iterator[None]:
        # Only from the forward part: in the backward part reentrant checkpointing may call a whole model again.
        if is_training_call() or parts.name != "forward":
            yield
        else:
            with parts.inside(EVALUATION):
                yield

    @contextmanager
    def backward() -> Iterator[None]:
        counts.backward += 1
        with parts.inside("backward"):
            yield

    try:
        with (
            _following_optimizer(optimizer, parts, counts, on_gradients),
            around_backward(backward),
            called(model, call),
        ):
            parts.enter("forward")
            yield counts
    finally:
        parts.leave()


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
    with replaced(home, "backward", within(home.backward)), replaced(home, "grad", within(home.grad)):
        yield


@contextmanager
def _following_optimizer(
    optimizer: torch.optim.Optimizer, parts: _Parts, counts: StepCounts, on_gradients: Callable[[], None] | None
) -> Iterator[None]:
    def before_step(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        counts.stepped += 1
        closure = closure_of(args, kwargs)
        if closure is None:
            if on_gradients is not None:
                on_gradients()
            parts.enter("optimizer")
            return None

        def followed() -> Any:
            with parts.inside("forward"):
                loss = closure()
            if on_gradients is not None:
                on_gradients()
            return loss

        parts.enter("optimizer")
        return ((followed, *args[1:]), kwargs) if args else (args, {**kwargs, "closure": followed})

    with _hooked_steps(optimizer, before_step, lambda: parts.enter("forward")):
        yield


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


@contextmanager
def around_step(optimizer: Any, before: Callable[[tuple[Any, ...], dict[str, Any]], None]) -> Iterator[None]:
    """Call ``before`` with the arguments of each ``optimizer.step()``. A step that is muted runs no hooks, and one that
    the user looked up earlier runs them alone."""
    told = False

    def step(real: Call, *args: Any, **kwargs: Any) -> Any:
        nonlocal told
        before(args, kwargs)
        told = True
        try:
            return real(*args, **kwargs)
        finally:
            told = False

    def hooked_step(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not told:
            before(args, kwargs)

    with _hooked_steps(optimizer, hooked_step, lambda: None), replaced_method(innermost(optimizer), "step", step):
        yield


@contextmanager
def _hooked_steps(
    optimizer: Any, before: Callable[[tuple[Any, ...], dict[str, Any]], Any], after: Callable[[], None]
) -> Iterator[None]:
    """Call ``before`` and ``after`` once for each step, also where a step calls that of its base class or of an
    optimizer that it holds. Hooks see a step that the user looked up earlier, too: ``step = optimizer.step``."""
    under_way = 0

    def enter(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal under_way
        under_way += 1
        changed = before(args[1:], kwargs) if under_way == 1 else None
        return ((args[0], *changed[0]), changed[1]) if changed else None

    def leave(*_: Any) -> None:
        nonlocal under_way
        under_way -= 1
        if not under_way:
            after()

    followed = [one for one in optimizers_of(optimizer) if has_hooks(one)]
    handles = [one.register_step_pre_hook(enter) for one in followed]
    with hooked([*handles, *(one.register_step_post_hook(leave) for one in followed)]):
        yield


def has_hooks(optimizer: Any) -> bool:
    """Whether its steps can be followed: not where a class never called ``torch.optim.Optimizer.__init__()``."""
    return hasattr(innermost(optimizer), "_optimizer_step_pre_hooks")


def called(
    model: torch.nn.Module, around: Callable[[list[Any]], AbstractContextManager[Any]]
) -> AbstractContextManager[None]:
    """Open ``around`` for each call of the model; the list that it is given holds the call's result at its end."""

    def around_it(inner: Call, args: Any, kwargs: Any) -> Any:
        result: list[Any] = []
        with around(result):
            result.append(inner(*args, **kwargs))
        return result[0]

    return replaced_call(model, around_it)


def replaced_call(model: torch.nn.Module, instead: Callable[[Call, Any, Any], Any]) -> AbstractContextManager[None]:
    """``instead(call, args, kwargs)`` in place of each call of the model.

    Not by hooks: those of a model that is compiled whole run inside its compiled code, and a hook that is new in each
    step would have it compiled again.
    """
    # Private: without ``model.compile()`` a module has no public place for another call.
    inner = model._compiled_call_impl or model._call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        return instead(inner, args, kwargs)

    return replaced(model, "_compiled_call_impl", call)


class _Parts:
    """The part that is open now; at most one is."""

    def __init__(self, phase: Phase) -> None:
        self._phase, self._open, self.name = phase, ExitStack(), ""

    def enter(self, name: str) -> None:
        self.leave()
        self.name = name
        self._open.enter_context(self._phase(name))

    def leave(self) -> None:
        self._open.close()
        self.name = ""

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        outer = self.name
        self.enter(name)
        try:
            yield
        finally:
            self.enter(outer)
