"""Follows a hand-written training step: which of it is forward, backward, optimizer, evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from pytest_fp8.zoo.training import Phase


@contextmanager
def follow(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    phase: Phase,
    on_gradients: Callable[[], None] | None = None,
) -> Iterator[None]:
    """Open ``phase`` for each part of the step that runs inside, however often the parts alternate.

    What runs inside ``backward()`` is backward, what runs inside ``optimizer.step()`` is optimizer, a call of the model
    without gradients is evaluation, and all else is forward. ``on_gradients`` runs before each optimizer step.
    """
    parts = _Parts(phase)
    real_backward = torch.autograd.backward

    def backward(*args: Any, **kwargs: Any) -> None:
        with parts.inside("backward"):
            real_backward(*args, **kwargs)

    def before_step(*_: Any) -> None:
        if on_gradients is not None:
            on_gradients()
        parts.enter("optimizer")

    def before_call(*_: Any) -> None:
        if not torch.is_grad_enabled():
            parts.enter("evaluation")

    def after_call(*_: Any) -> None:
        if parts.name == "evaluation":
            parts.enter("forward")

    hooks: list[Any] = [
        optimizer.register_step_pre_hook(before_step),
        optimizer.register_step_post_hook(lambda *_: parts.enter("forward")),
        model.register_forward_pre_hook(before_call),
        model.register_forward_hook(after_call, always_call=True),
    ]
    # Tensor.backward looks the function up here at each call.
    torch.autograd.backward = backward
    try:
        parts.enter("forward")
        yield
    finally:
        torch.autograd.backward = real_backward
        for hook in hooks:
            hook.remove()
        parts.leave()


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
