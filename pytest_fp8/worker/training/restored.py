"""Contexts at whose end attributes, hooks and the values of tensors are what they were before."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType, MethodType
from typing import Any
from unittest.mock import patch

import torch


@contextmanager
def replaced_method(owner: Any, name: str, instead: Callable[..., Any]) -> Iterator[None]:
    """``instead(method, *args, **kwargs)`` in place of ``owner``'s method. Who looks the method up inside and keeps it
    has the method itself afterwards."""
    real, is_open = getattr(owner, name), True

    def call(*args: Any, **kwargs: Any) -> Any:
        return instead(real, *args, **kwargs) if is_open else real(*args, **kwargs)

    # Private: torch's schedules look for it at an optimizer's step and warn without it.
    call._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    try:
        with patch.object(owner, name, call):
            yield
    finally:
        is_open = False


def followed(modules: Iterable[torch.nn.Module]) -> list[Any]:
    """Let ``layer.forward(x)`` run the layer's hooks as ``layer(x)`` does, which torch alone does not; gives handles
    that end it. For what runs uncompiled. A forward that was set on the layer itself is left as it is."""
    return [_Followed(module) for module in modules if "forward" not in vars(module)]


class _Followed:
    """The handle of one layer."""

    def __init__(self, module: torch.nn.Module) -> None:
        # A method, so that a deep copy of the layer calls the copy.
        self._held, self._forward = vars(module), MethodType(forward, module)
        self._held["forward"] = self._forward

    def remove(self) -> None:
        if self._held.get("forward") is self._forward:
            del self._held["forward"]


def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """In place of a layer's own method, whose name it has, so that a layer that is pickled meanwhile finds its own."""
    if _is_being_called(self, sys._getframe(1)):
        return type(self).forward(self, *args, **kwargs)
    return torch.nn.Module.__call__(self, *args, **kwargs)


def _is_being_called(module: torch.nn.Module, frame: FrameType | None) -> bool:
    """Whether a call of the module is under way, as ``module(x)``: it, or one of its hooks, then calls ``forward``."""
    # Private: public ``__call__`` is this function, of which frames have the name.
    call = torch.nn.Module._call_impl.__code__
    while frame is not None and not (frame.f_code is call and frame.f_locals["self"] is module):
        frame = frame.f_back
    return frame is not None


@contextmanager
def hooked(handles: Iterable[Any]) -> Iterator[None]:
    """Hooks that were registered are removed."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class Hook:
    """A hook that a copy of the module, or one that is saved, does not take along."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    def __call__(self, *args: Any) -> Any:
        return self.call(*args)

    def __reduce__(self) -> Any:
        return Hook, (_nothing,)


def _nothing(*args: Any) -> None:
    pass


def hooks_of(parameter: torch.Tensor) -> dict[int, Any]:
    """What autograd calls when it has added to the parameter's gradient, by the keys of the hooks' handles."""
    # Private: torch has no public list of a tensor's hooks.
    return getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
