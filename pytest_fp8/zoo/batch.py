"""The tensors in a value, whatever holds them: dicts, lists, tuples, dataclasses, objects with attributes."""

from __future__ import annotations

import copy
import sys
from collections import UserList, deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

DEEPEST = 6
"""Levels of holders that are searched."""
_SEQUENCES = (list, tuple, deque, UserList)


def with_tensors(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A copy of the batch in which each tensor is what ``change`` gives for it. What holds no tensor stays itself."""
    return with_named_tensors(batch, lambda _, tensor: change(tensor))


def with_named_tensors(batch: Any, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Any:
    """The same; ``change`` is given the name of the tensor's own entry as well."""
    return _rebuilt(batch, "", change, {})


def tensors_of(value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor in a value with its name there, in order: ``inner.x``, ``0``; the value itself has no name."""
    yield from _found(value, "", frozenset())


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The same without names."""
    yield from (tensor for _, tensor in tensors_of(value))


def storage_of(content: bytes, dtype: Any) -> Any:
    """A storage of torch's, as a tensor that a workload's functions hold comes to an arm. ``content``: the bytes of the
    whole storage; ``dtype``: of its elements."""
    import torch

    values = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
    return torch.storage.TypedStorage(wrap_storage=values.untyped_storage(), dtype=dtype, _internal=True)


def _rebuilt(value: Any, name: str, change: Callable[[str, torch.Tensor], torch.Tensor], made: dict[int, Any]) -> Any:
    """``made``: the copies of the holders around it, by the ids of these."""
    import torch

    if isinstance(value, torch.Tensor):
        return change(name, value)
    if id(value) in made:
        return made[id(value)]
    if next(tensors_in(value), None) is None:
        return value
    read_only = isinstance(value, tuple) or (isinstance(value, Mapping) and not isinstance(value, MutableMapping))
    copied: Any = None if read_only else copy.copy(value)
    if not read_only:
        made[id(value)] = copied
    parts = {key: _rebuilt(part, str(key), change, made) for key, part in _parts(value)}
    if isinstance(value, tuple):
        # A named tuple takes its values as separate arguments.
        return type(value)(*parts.values()) if hasattr(value, "_fields") else type(value)(parts.values())
    if read_only:
        return type(value)(parts)
    for key, part in parts.items():
        if isinstance(value, (MutableMapping, *_SEQUENCES)):
            copied[key] = part
        else:
            # A frozen dataclass refuses setattr.
            object.__setattr__(copied, key, part)
    if isinstance(value, dict) and getattr(value, "__dict__", None) is value:
        copied.__dict__ = copied  # its entries are its attributes
    return copied


def _found(value: Any, name: str, above: frozenset[int]) -> Iterator[tuple[str, torch.Tensor]]:
    import torch

    if isinstance(value, torch.Tensor):
        yield name, value
    elif id(value) not in above and len(above) <= DEEPEST:
        for key, part in _parts(value):
            yield from _found(part, f"{name}.{key}" if name else str(key), above | {id(value)})


def _parts(value: Any) -> list[tuple[Any, Any]]:
    """Names and values of what a holder of tensors holds; nothing of all else.

    An object counts by its attributes, unless it is a module, a model, a function, or of Python's own or numpy's
    classes.
    """
    import torch

    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, _SEQUENCES):
        return list(enumerate(value)) if not hasattr(value, "_fields") else list(zip(value._fields, value, strict=True))
    if isinstance(value, (torch.nn.Module, ModuleType, type)) or callable(value):
        return []
    top = type(value).__module__.partition(".")[0]
    if top in ("numpy", "builtins") or (top in sys.stdlib_module_names and not isinstance(value, SimpleNamespace)):
        return []
    # What copy and pickle see of an object: a dict of its attributes, with __slots__ a pair of two dicts.
    held: Any = object.__getstate__(value)
    return [item for each in (held if isinstance(held, tuple) else [held]) for item in (each or {}).items()]
