"""What the hash of an own model's case is made of: the text of a value, the same in every process and every Python."""

from __future__ import annotations

import argparse
import collections
import enum
import functools
import hashlib
import inspect
import math
import os
import re
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import PurePath
from typing import Any

from pytest_fp8.sources import filled_cells, is_generated, is_local, names_in, source_of

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis))
_BUILTIN = (
    types.BuiltinFunctionType,
    types.MethodWrapperType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
)
_DEEPEST = 80
"""Levels down to which values are looked into; a chain of objects may have thousands."""
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
_TUPLE_FIELD = type(vars(collections.namedtuple("_Tuple", "field"))["field"])
_FLAT = 100
"""Entries from which on a list of plain values is written at once."""
_NO_SETTING = re.compile(r"^_(?!attn_implementation)|version|path|file|dir\b|cache", re.IGNORECASE)
"""Attributes of a library's object that say nothing of what it does: its own, who made it, and where from."""


class Fingerprint:
    """Texts of values: the source of what was written in the modules ``own``, and all that it can depend on.

    A function or class of those modules counts by its source, with what it closes over and the constants, functions and
    classes of its module that it names. What else can be imported counts by its name: how that code does is what a
    baseline is held against. Objects count by what they hold; of another module's, by what they hold in public, but
    for the version that made them. Of tensors, arrays and torch modules the shapes count and not the numbers, which
    each process may draw anew; paths by their place beside the module; and what shows only its address by its type.

    No code of a value's own is run: no property, no ``__getattr__``, no ``__iter__``.
    """

    def __init__(self, own: Collection[str], home: str = "") -> None:
        """``home``: the module beside which paths are told."""
        self.own = own
        self._folder = os.path.dirname(os.path.abspath(getattr(sys.modules.get(home), "__file__", None) or os.sep))
        # By identity, each value kept so that its number is not given to another; its text while it is being written
        # is what a value says that leads back to itself.
        self._known: dict[int, tuple[Any, str]] = {}
        self._depth = 0

    def text(self, value: Any) -> str:
        """A plain value's own text, and a hash for all else. Equal values have equal texts, wherever they are held."""
        kind = type(value)
        if kind is str or issubclass(kind, PurePath):
            return self._string(value)
        if kind in _PLAIN:
            return hex(value) if kind is int and abs(value) >= 1 << 1000 else repr(value)
        if kind is types.ModuleType:
            return str(value.__name__)
        if id(value) not in self._known:
            if self._depth == _DEEPEST:
                return _name(kind)
            self._known[id(value)] = value, "itself"
            self._depth += 1
            content = "\0".join(self._parts(value))
            self._depth -= 1
            self._known[id(value)] = value, hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()
        return self._known[id(value)][1]

    def _string(self, value: Any) -> str:
        """A path below the file system's root is told from where the module stands: a checkout may be anywhere."""
        said = str(value)
        if os.path.isabs(said) and os.path.commonpath([said, self._folder]) != os.sep:
            said = os.path.relpath(said, self._folder)
        return repr(said) if isinstance(value, str) else f"path {said!r}"

    def _parts(self, value: Any) -> Iterable[str]:
        # By the type alone: what a value says of its class is code of its own.
        kind = type(value)
        if issubclass(kind, _loaded("torch.nn", "Module")):
            return self._module(value)
        if issubclass(kind, (_loaded("torch", "Tensor"), _loaded("numpy", "ndarray"))):
            return self._all(kind, _shape(value))
        if issubclass(kind, _loaded("numpy", "generic")):
            return self._all(kind, value.item())
        if issubclass(kind, _loaded("numpy", "ufunc")):
            return self._all(kind, value.__name__)
        parts = next((parts for kinds, parts in self._KINDS if issubclass(kind, kinds)), Fingerprint._object)
        return parts(self, value)

    def _all(self, *parts: Any) -> Iterator[str]:
        return (self.text(part) for part in parts)

    def _list(self, value: Any) -> Iterator[str]:
        base = list if isinstance(value, list) else tuple
        yield self.text(type(value))
        if len(value) > _FLAT and all(type(item) in _PLAIN for item in base.__iter__(value)):
            yield base.__repr__(value)
        else:
            yield from self._all(*base.__iter__(value))
        yield from self._more(value, base)

    def _set(self, value: Any) -> Iterator[str]:
        base = set if isinstance(value, set) else frozenset
        # In an order that does not depend on what the members refer to, which may be each other.
        ordered = sorted(base.__iter__(value), key=_at_a_glance)
        yield from (self.text(type(value)), *sorted(self.text(item) for item in ordered))
        yield from self._more(value, base)

    def _dict(self, value: Any) -> Iterator[str]:
        base = dict if isinstance(value, dict) else types.MappingProxyType
        yield from self._all(type(value), *(part for pair in base.items(value) for part in pair))
        if isinstance(value, collections.defaultdict):
            yield self.text(value.default_factory)
        yield from self._more(value, base)

    def _subclass(self, value: Any) -> Iterator[str]:
        """A number or string of a class of one's own, or of numpy's."""
        base: Any = next(kind for kind in _PLAIN if isinstance(value, kind))
        yield from (self.text(type(value)), base.__repr__(value))
        yield from self._more(value, base)

    def _more(self, value: Any, base: type) -> Iterator[str]:
        """What an instance of a derived class holds beside what its base holds."""
        return iter(()) if type(value) is base else self._attributes(_held(value), type(value))

    def _enum(self, value: enum.Enum) -> Iterator[str]:
        return self._all(type(value), value._name_, value._value_)

    def _function(self, function: types.FunctionType) -> Iterator[str]:
        if function.__globals__.get("__name__") in self.own:
            yield source_of(function)
            yield from self._all(function.__defaults__, function.__kwdefaults__)
            yield from self._references(function)
            return
        yield _name(function)
        if is_local(function):
            # A library's decorator, or a function that one of its functions made, which no name leads to: what it was
            # given by its user, and none of the library's own state.
            for name, value in sorted(dict(filled_cells(function)).items()):
                if type(value) in (int, float, str) or self._is_own(value) or is_local(value):
                    yield from self._all(name, value)
        registry = vars(function).get("registry")
        if isinstance(registry, types.MappingProxyType):
            # functools.singledispatch
            yield self.text(registry)

    def _references(self, function: types.FunctionType) -> Iterator[str]:
        """What the function names without saying what it is."""
        module, names = function.__globals__, names_in(function.__code__)
        # Where the module lies and what imported it (pytest's assertions, too) is no part of it.
        found = {n: module[n] for n in names if n in module and (n == "__name__" or not n.startswith(("__", "@")))}
        for name, value in sorted({**found, **dict(filled_cells(function))}.items()):
            yield name
            yield self.text(value)
            if type(value) is types.ModuleType and value.__name__ in self.own:
                yield from self._all(*(vars(value)[attribute] for attribute in sorted(names & vars(value).keys())))

    def _is_own(self, value: Any) -> bool:
        if type(value) is types.FunctionType:
            return value.__globals__.get("__name__") in self.own or value.__module__ in self.own
        return isinstance(value, type) and value.__module__ in self.own

    def _class(self, kind: type) -> Iterator[str]:
        if kind.__module__ not in self.own:
            yield _name(kind)
            return
        yield kind.__qualname__
        yield from self._all(*kind.__bases__, type(kind))
        if isinstance(kind, enum.EnumType):
            yield from self._all(*(part for n, m in kind._member_map_.items() for part in (n, m._value_)))
        for name, member in sorted(vars(kind).items()):
            if name == "__dataclass_fields__":
                for field in member.values():
                    yield from self._all(field.name, field.default, field.default_factory)
            elif self._is_written(kind, name, member):
                yield name
                yield self.text(member)

    def _is_written(self, kind: type, name: str, member: Any) -> bool:
        """Whether somebody wrote this member of the class: not Python, nor a decorator or metaclass."""
        function = member.__func__ if isinstance(member, (staticmethod, classmethod)) else member
        if isinstance(function, types.FunctionType):
            return function.__module__ in self.own and not is_generated(function)
        if isinstance(member, (types.MemberDescriptorType, types.GetSetDescriptorType, _TUPLE_FIELD)):
            return False
        if isinstance(kind, enum.EnumType):
            return isinstance(member, property) and member.fget is not None
        return name == "__pydantic_fields__" or not name.startswith(("__", "_abc_", "_is_protocol", "_is_runtime"))

    def _object(self, value: Any) -> Iterator[str]:
        yield self.text(type(value))
        held = _held(value)
        yield from self._attributes(held, type(value))
        if not held and type(value).__module__ not in self.own and value is not os.environ:
            yield _said(value)

    def _attributes(self, held: dict[str, Any], kind: type) -> Iterator[str]:
        private = kind.__module__ in self.own
        for name, part in sorted(held.items()):
            # What a property keeps depends on who asked for it before.
            kept = isinstance(inspect.getattr_static(kind, name, None), functools.cached_property)
            if not kept and (private or not _NO_SETTING.search(name)):
                yield name
                yield self.text(part)

    def _module(self, value: Any) -> Iterator[str]:
        """A torch module: of each within it its class, its settings and its shapes."""
        torch_s = vars(sys.modules["torch.nn"].Module()).keys() - {"training"}
        for name, module in value.named_modules():
            yield from self._all(name, type(module))
            yield from self._attributes({n: v for n, v in vars(module).items() if n not in torch_s}, type(module))
            for tensors in (module._parameters, module._buffers):
                yield from self._all(*(part for n, tensor in tensors.items() for part in (n, _shape(tensor))))

    # By what a value is, the first that fits.
    _KINDS: tuple[tuple[Any, Callable[..., Iterable[str]]], ...] = (
        (types.FunctionType, _function),
        (type, _class),
        (types.MethodType, lambda self, v: self._all("method", v.__func__, v.__self__)),
        (functools.partial, lambda self, v: self._all("partial", v.func, v.args, v.keywords)),
        (functools.partialmethod, lambda self, v: self._all("partial", v.func, v.args, v.keywords)),
        ((staticmethod, classmethod), lambda self, v: self._all(type(v), v.__func__)),
        (property, lambda self, v: self._all(property, v.fget, v.fset, v.fdel)),
        (functools.cached_property, lambda self, v: self._all(type(v), v.func)),
        (functools.singledispatchmethod, lambda self, v: self._all(type(v), v.dispatcher)),
        (functools._lru_cache_wrapper, lambda self, v: self._all(type(v), v.__wrapped__)),
        (enum.Enum, _enum),
        ((list, tuple), _list),
        ((set, frozenset), _set),
        ((dict, types.MappingProxyType), _dict),
        (collections.deque, lambda self, v: self._all(type(v), list(collections.deque.__iter__(v)), v.maxlen)),
        (
            (collections.UserDict, collections.UserList, collections.UserString),
            lambda self, v: self._all(*vars(v).values()),
        ),
        (re.Pattern, lambda self, v: self._all(re.Pattern, v.pattern, v.flags)),
        (_BUILTIN, lambda self, v: self._all(v.__qualname__, getattr(v, "__self__", None))),
        (_PLAIN, _subclass),
    )


def _held(value: Any) -> dict[str, Any]:
    """The attributes of an object, those in slots too. None of what Python itself brings (a date, a logger), which has
    a text or says nothing, but for its namespaces."""
    kind = type(value)
    if kind.__module__.partition(".")[0] in sys.stdlib_module_names and kind not in _NAMESPACES:
        return {}
    try:
        state = object.__getstate__(value)
    except TypeError:
        # What C made, and cannot be taken apart: a torch.Generator.
        return {}
    parts = state if isinstance(state, tuple) else (state,)
    return {str(name): held for part in parts if isinstance(part, dict) for name, held in part.items()}


def _said(value: Any) -> str:
    """How a library's object presents itself (a dtype, a date), if that is more than a type and an address."""
    try:
        said = repr(value)
    except Exception:
        return ""
    return "" if said.startswith("<") or re.search(r"\b0x[0-9a-f]+", said) else said


def _loaded(module: str, name: str) -> tuple[type, ...]:
    """A class of a library that is imported already; else none."""
    found = getattr(sys.modules.get(module), name, None)
    return (found,) if isinstance(found, type) else ()


def _shape(value: Any) -> Any:
    """A tensor's or an array's shape and dtype; with the values of a small one of integers, and of a single number."""
    if value is None:
        return None
    try:
        shape, dtype = tuple(value.shape), str(value.dtype)
        counts = "int" in dtype or "bool" in dtype or not shape
        known = not hasattr(value, "device") or str(value.device) == "cpu"
        return shape, dtype, value.tolist() if counts and known and math.prod(shape) <= _FLAT else ""
    except Exception:
        # Lazy, on the meta device, or of a subclass that refuses.
        return "no shape"


def _at_a_glance(value: Any) -> str:
    """A text that looks at a value alone and not at what that holds, but for plain attributes."""
    if issubclass(type(value), (type, types.FunctionType)):
        return _name(value)
    if type(value) in _PLAIN:
        return f"{type(value).__name__} {value!r}"
    plain = {name: held for name, held in getattr(value, "__dict__", {}).items() if type(held) in _PLAIN}
    return f"{_name(type(value))} {sorted(plain.items())!r}"


def _name(value: types.FunctionType | type) -> str:
    return f"{value.__module__}.{value.__qualname__}"
