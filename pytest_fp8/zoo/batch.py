"""The tensors in a value, whatever holds them: dicts, lists, tuples, dataclasses, objects with attributes."""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

DEEPEST = 6
"""Levels of holders that are searched."""


def with_tensors(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A copy of the batch in which each tensor is what ``change`` gives for it. What holds no tensor stays itself."""
    return _changed(batch, change, frozenset())


def tensors_of(value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor in a value with its name there, in order: ``inner.x``, ``0``; the value itself has no name."""
    import torch

    yield from ((name, leaf) for name, leaf in _leaves(value, "", frozenset()) if isinstance(leaf, torch.Tensor))


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The same without names."""
    yield from (tensor for _, tensor in tensors_of(value))


def arrays_of(batch: Any) -> list[str]:
    """Names of numpy's arrays in the batch, which no model takes."""
    return [name or "the batch" for name, value in _leaves(batch, "", frozenset()) if type(value).__module__ == "numpy"]


def _changed(value: Any, change: Callable[[torch.Tensor], torch.Tensor], above: frozenset[int]) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        return change(value)
    if id(value) in above:
        return value
    inside = above | {id(value)}
    if isinstance(value, dict):
        return {name: _changed(part, change, inside) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [_changed(part, change, inside) for part in value]
        # A named tuple takes its values as separate arguments.
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if next(tensors_in(value), None) is None:
        return value
    made = copy.copy(value)
    for name, part in _parts(value):
        if isinstance(value, MutableMapping):
            made[name] = _changed(part, change, inside)
        else:
            # A frozen dataclass refuses setattr.
            object.__setattr__(made, name, _changed(part, change, inside))
    return made


def _leaves(value: Any, name: str, above: frozenset[int]) -> Iterator[tuple[str, Any]]:
    """Everything in a value that holds nothing further, each with its name."""
    if id(value) in above or len(above) > DEEPEST:
        return
    parts = _parts(value)
    if parts is None:
        yield name, value
        return
    for place, part in parts:
        yield from _leaves(part, f"{name}.{place}" if name else str(place), above | {id(value)})


def _parts(value: Any) -> Any:
    """Names and values of what a holder of tensors holds; ``None`` for all else.

    An object counts by its attributes, unless it is a module, a model, a function, or of Python's own or numpy's
    classes.
    """
    import torch

    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, (list, tuple)):
        return list(zip(getattr(value, "_fields", range(len(value))), value, strict=True))
    if isinstance(value, (torch.Tensor, torch.nn.Module, ModuleType, type)):
        return None
    if dataclasses.is_dataclass(value):
        return [(field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value)]
    top = type(value).__module__.partition(".")[0]
    foreign = top == "numpy" or (top in sys.stdlib_module_names and not isinstance(value, SimpleNamespace))
    return None if foreign or callable(value) or not hasattr(value, "__dict__") else list(vars(value).items())
