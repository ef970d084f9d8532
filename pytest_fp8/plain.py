"""Records to and from plain data (what JSON can hold). Strict: a missing or unknown key is an error.

Understands frozen dataclasses with fields of scalars, enums of strings, ``Any``, records, ``Mapping``, ``Sequence``,
``tuple`` and ``None`` beside one of these; ``Annotated`` with rules, each of which gets the value and its name and
raises for what it refuses.
"""

from __future__ import annotations

import json
import math
from array import array
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import StrEnum
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
SCALARS = (str, int, float, bool)
NUMBERS: dict[Any, Any] = {float: (float, int)}


class PlainDataError(ValueError):
    """The data is not the record that it should be; the message names the record and the key."""


def to_plain(value: Any) -> Any:
    """``value`` as dictionaries, lists and scalars. Records become dictionaries with every field in them."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    return value.value if isinstance(value, StrEnum) else value


def finite(value: Any) -> Any:
    """Plain data with ``None`` for each number that is not finite: JSON has none, and a loss may be."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def from_plain(cls: type[T], data: Any, where: str = "") -> T:
    """The record of type ``cls`` in ``data``, which an error calls ``where``. Raises :class:`PlainDataError`.

    A field's default counts for records written by hand, never here: what an arm did not say is not taken as healthy.
    """
    record: T = _record(cls, data, where or cls.__name__)
    return record


def _record(cls: Any, data: Any, where: str) -> Any:
    wanted = types_of(cls)
    if not isinstance(data, Mapping):
        raise PlainDataError(f"{where} is {type(data).__name__}, not a record")
    for key in wanted:
        if key not in data:
            raise PlainDataError(f"{where} lacks {key!r}")
    for key in data:
        if key not in wanted:
            raise PlainDataError(f"{where} has no field {key!r:.60}")
    return cls(**{key: plain_value(wanted[key], item, f"{where}.{key}") for key, item in data.items()})


@cache
def types_of(cls: Any) -> dict[str, Any]:
    """A record's annotation of each field."""
    hints = get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in fields(cls)}


def plain_value(kind: Any, value: Any, where: str) -> Any:
    """``value`` as what the annotation ``kind`` says; an error calls it ``where``. A whole number is a ``float``, too;
    a truth is no number."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        found = plain_value(inner[0], value, where)
        for rule in inner[1:]:
            rule(found, where)
        return found
    if origin in (Union, UnionType):
        if value is None and NoneType in inner:
            return None
        [kind] = [one for one in inner if one is not NoneType]
        return plain_value(kind, value, where)
    if is_dataclass(kind):
        return _record(kind, value, where)
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise PlainDataError(f"{where} is {type(value).__name__}, not a mapping")
        return {
            plain_value(inner[0], key, f"a key of {where}"): plain_value(inner[1], item, f"{where}[{key!r:.60}]")
            for key, item in value.items()
        }
    if origin is not None and issubclass(origin, (Sequence, tuple)):
        return _sequence(origin, inner, value, where)
    if kind in SCALARS and not (
        isinstance(value, NUMBERS.get(kind, kind)) and isinstance(value, bool) == (kind is bool)
    ):
        raise PlainDataError(f"{where} is {type(value).__name__}, not {kind.__name__}")
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        if value not in list(kind):
            raise PlainDataError(f"{where} is {value!r}, none of {', '.join(kind)}")
        return kind(value)
    return value


def _sequence(origin: Any, inner: tuple[Any, ...], value: Any, where: str) -> Any:
    if not isinstance(value, (list, tuple)):
        raise PlainDataError(f"{where} is {type(value).__name__}, not a list")
    if origin is not tuple or inner[-1] is Ellipsis:
        items = [plain_value(inner[0], item, f"{where}[{index}]") for index, item in enumerate(value)]
        return tuple(items) if origin is tuple else items
    if len(value) != len(inner):
        raise PlainDataError(f"{where} has {len(value)} values, not {len(inner)}")
    return tuple(plain_value(one, item, where) for one, item in zip(inner, value, strict=True))


def strict_json(text: str | bytes) -> Any:
    """JSON without NaN and infinity. Raises ``ValueError``, and ``RecursionError`` for what is nested too deeply."""
    return json.loads(text, parse_constant=_finite_number, parse_float=_finite_number)


def _finite_number(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise PlainDataError(f"{text:.60} is no number, or too large a one")
    return value


Rule = Callable[[Any, str], None]
"""Of an annotated field: gets the value and its name; raises :class:`PlainDataError`."""


def between(low: float, high: float) -> Rule:
    def check(value: Any, where: str) -> None:
        if not low <= value <= high:
            raise PlainDataError(f"{where} is {value!r:.60}, not a number from {low:g} to {high:g}")

    return check


def sized(least: int, most: int) -> Rule:
    """A list or mapping of so many values."""

    def check(value: Any, where: str) -> None:
        if not least <= len(value) <= most:
            raise PlainDataError(f"{where} has {len(value)} values, not {least} to {most}")

    return check


# -- float32 numbers as text: how an arm tells sketches of gradients, and what modules give ---------------------------


def in_text(numbers: Any) -> str:
    """Of an array of Python or of numpy."""
    return b64encode(numbers.tobytes()).decode()


def of_text(text: str) -> array[float]:
    return array("f", b64decode(text))
