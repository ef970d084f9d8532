"""What the hash of an own model's case is made of: the text of a value, the same in every process and every Python."""

from __future__ import annotations

import enum
import functools
import hashlib
import inspect
import os
import re
import sys
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis))


class Fingerprint:
    """Texts of values: the source of what was written in the modules ``own``, and all that it can depend on.

    A function or class of those modules counts by its source, with what it closes over and the constants, functions and
    classes of its module that it names. What else can be imported counts by its name: how that code does is what a
    baseline is held against. Objects count by what they hold; of another module's, by what they hold in public, but
    for the version that made them. Of tensors, arrays and torch modules the shapes count and not the numbers, which
    each process may draw anew; and what shows only its address counts by its type.
    """

    def __init__(self, own: Collection[str]) -> None:
        self.own = own
        # By identity, each value kept so that its number is not given to another; its text while it is being written
        # is what a value says that leads back to itself.
        self._known: dict[int, tuple[Any, str]] = {}

    def text(self, value: Any) -> str:
        """A plain value's own text, and a hash for all else. Equal values have equal texts, wherever they are held."""
        if isinstance(value, enum.Enum):
            return f"{type(value).__qualname__}.{value.name} {self.text(value.value)}"
        if isinstance(value, _PLAIN):
            return repr(value)
        if isinstance(value, types.ModuleType):
            return value.__name__
        if id(value) not in self._known:
            self._known[id(value)] = value, "itself"
            content = "\0".join(self._parts(value))
            self._known[id(value)] = value, hashlib.sha256(content.encode()).hexdigest()
        return self._known[id(value)][1]

    def _parts(self, value: Any) -> Iterable[str]:
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, types.MethodType):
            return self._all("method", value.__func__, value.__self__)
        if isinstance(value, functools.partial):
            return self._all("partial", value.func, value.args, value.keywords)
        if isinstance(value, (list, tuple)):
            return self._all(type(value), *value)
        if isinstance(value, (set, frozenset)):
            return [self.text(type(value)), *sorted(self.text(item) for item in value)]
        if isinstance(value, Mapping) and value is not os.environ:
            return self._all(type(value), *(part for pair in value.items() for part in pair))
        return self._object(value)

    def _all(self, *parts: Any) -> Iterator[str]:
        return (self.text(part) for part in parts)

    def _function(self, function: types.FunctionType) -> Iterator[str]:
        source = self._source(function)
        yield source
        if source != _name(function):
            yield from self._all(function.__defaults__, function.__kwdefaults__)
            yield from self._references(function)

    def _class(self, kind: type) -> Iterator[str]:
        source = self._source(kind)
        yield source
        if source != _name(kind):
            yield from self._all(*kind.__bases__)
            for name, member in sorted(vars(kind).items()):
                for function in _functions_of(member):
                    yield from self._references(function)
                if isinstance(member, (*_PLAIN, list, tuple, dict)) and not name.startswith("_"):
                    yield self.text(member)

    def _source(self, value: types.FunctionType | type) -> str:
        try:
            return inspect.getsource(value) if value.__module__ in self.own else _name(value)
        except (OSError, TypeError):
            return _name(value)

    def _references(self, function: types.FunctionType) -> Iterator[str]:
        """What the function names without saying what it is. A cell that is not filled yet holds nothing."""
        found: dict[str, Any] = {}
        module = function.__globals__
        if module.get("__name__") in self.own:
            found = {name: module[name] for name in _names(function.__code__) if name in module}
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                found[name] = cell.cell_contents
            except ValueError:
                continue
        for name, value in sorted(found.items()):
            yield name
            yield self.text(value)

    def _object(self, value: Any) -> Iterator[str]:
        yield self.text(type(value))
        if "__wrapped__" in getattr(value, "__dict__", ()):
            # functools.cache and its like.
            yield self.text(value.__wrapped__)
        elif described := _sizes(value):
            yield described
        elif held := _held(value):
            private = type(value).__module__ in self.own
            for name, part in sorted(held.items()):
                if private or not (name.startswith("_") or "version" in name):
                    yield name
                    yield self.text(part)
        elif value is not os.environ:
            said = repr(value)
            yield "" if said.startswith("<") or re.search(r"\b0x[0-9a-f]+", said) else said


def _held(value: Any) -> dict[str, Any]:
    """The attributes of an object, those in slots too; none of what Python itself brings (a path, a logger, a date)."""
    if type(value).__module__.partition(".")[0] in sys.stdlib_module_names:
        return {}
    try:
        state = object.__getstate__(value)
    except TypeError:
        # What C made, and cannot be taken apart: a torch.Generator.
        return {}
    parts = state if isinstance(state, tuple) else (state,)
    return {name: held for part in parts if isinstance(part, dict) for name, held in part.items()}


def _sizes(value: Any) -> str:
    """A tensor's or an array's shape and dtype, a torch module's structure with all its shapes; else nothing."""
    torch = sys.modules.get("torch.nn")
    if torch is not None and isinstance(value, torch.Module):
        return f"{value!r} {[(name, _sizes(tensor)) for name, tensor in value.state_dict().items()]}"
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    return f"{tuple(shape)} {dtype}" if isinstance(shape, tuple) and dtype is not None else ""


def _functions_of(member: Any) -> Iterator[types.FunctionType]:
    """The functions that a member of a class stands for, without what wraps them, and none that a dataclass wrote."""
    parts = [getattr(member, "__func__", getattr(member, "func", member))]
    if isinstance(member, property):
        parts = [member.fget, member.fset, member.fdel]
    for part in (inspect.unwrap(part) for part in parts if callable(part)):
        if isinstance(part, types.FunctionType) and not part.__code__.co_filename.startswith("<"):
            yield part


def _names(code: types.CodeType) -> set[str]:
    """Names in a function and in what is defined within it: up to Python 3.11 a comprehension is a function, too."""
    inner = (part for part in code.co_consts if isinstance(part, types.CodeType))
    return set(code.co_names).union(*(_names(part) for part in inner))


def _name(value: types.FunctionType | type) -> str:
    return f"{value.__module__}.{value.__qualname__}"
