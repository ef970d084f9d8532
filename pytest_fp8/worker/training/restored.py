"""Contexts at whose end attributes, hooks and the values of tensors are what they were before."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """``owner.name`` is ``value``, for a module of Python, a class or one object of it."""
    own = name in vars(owner)
    held = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, held)
        else:
            delattr(owner, name)


def around(
    modules: Mapping[str, torch.nn.Module], before: Callable[[str], Any], after: Callable[[str], Any]
) -> list[Any]:
    """Register hooks before and after the calls of these modules, made for each by its name; gives their handles.
    ``before`` makes one that is given keyword arguments, too."""
    handles: list[Any] = []
    for name, module in modules.items():
        handles.append(module.register_forward_pre_hook(before(name), with_kwargs=True))
        handles.append(module.register_forward_hook(after(name)))
    return handles


@contextmanager
def hooked(handles: Iterable[Any]) -> Iterator[None]:
    """Hooks that were registered are removed."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def hooks_of(parameter: torch.Tensor) -> dict[int, Any]:
    """What autograd calls when it has added to the parameter's gradient, by the keys of the hooks' handles."""
    return getattr(parameter, "_post_accumulate_grad_hooks", None) or {}


@contextmanager
def values_kept(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """The tensors may be changed in place."""
    held = [(tensor, tensor.detach().clone()) for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in held:
                tensor.copy_(value)
