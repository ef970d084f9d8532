"""Stored baselines, mutated: bytes, JSON, and JSON whose digest was made to fit again. Seeded."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

from pytest_fp8.baselines.record import digest

SCALARS: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 3, 10**30, -(10**400), 1e-300, 1e300, 0.5, -0.0, float("nan"), float("inf"),
    "", "x", "speedup", "2026-11-22", "2026-02-30", "9999-12-31", "\ud800", "\x1b[31m", "\u202e", "x" * 3000, "../../x",
    [], {}, [[]], {"": 0}, [0.1], [[0.1]], [[None]],
)  # fmt: skip
"""What takes the place of a value."""
TEXTS = (
    b"NaN",
    b"Infinity",
    b"-Infinity",
    b"1e999",
    b"-1e999",
    b"[" * 3000,
    b'{"a":' * 3000,
    b"\xff",
    b"\x00",
    b"//",
    b"",
)


def mutants(text: str, count: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """``count`` mutated files: how it was done, and the bytes."""
    rng = random.Random(seed)
    for index in range(count):
        way = ("bytes", "json", "signed")[index % 3]
        yield way, _bytes(text.encode(), rng) if way == "bytes" else _json(json.loads(text), rng, way == "signed")


def _bytes(data: bytes, rng: random.Random) -> bytes:
    for _ in range(rng.choice((1, 1, 2, 5))):
        start = rng.randrange(len(data) + 1)
        end = min(len(data), start + rng.choice((0, 1, 1, 4, 30, 1000)))
        part = data[start:end]
        new = rng.choice(
            (b"", bytes([rng.randrange(256)]), rng.choice(TEXTS), part + part, part[::-1], data[:end], part.swapcase())
        )
        data = data[:start] + new + data[end:]
    return data


def _json(data: Any, rng: random.Random, sign: bool) -> bytes:
    for _ in range(rng.choice((1, 1, 2, 4))):
        _change(data, rng)
    if sign and isinstance(data, dict):
        try:
            data["digest"] = digest(data)
        except (ValueError, TypeError):
            data["digest"] = "0" * 64
    return json.dumps(data).encode()


def _change(data: Any, rng: random.Random) -> None:
    """One value somewhere in ``data`` is replaced, removed, doubled, renamed, moved, or a little another number."""
    there = list(places(data))
    holder, key = rng.choice(there)
    value = holder[key]
    how = rng.choice(("replace", "replace", "nudge", "remove", "double", "rename", "swap"))
    if how == "nudge" and isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300:
        holder[key] = rng.choice((value + 1, value * 1.001, -value, value * 1e6, int(value), float(value), str(value)))
    elif how == "remove":
        del holder[key]
    elif how == "double" and isinstance(holder, list):
        holder[key:key] = [copy.deepcopy(value) for _ in range(rng.choice((1, 10, 70)))]
    elif how == "rename" and isinstance(holder, dict):
        holder[rng.choice(("x", "kept", "schema", "tolerance", "\x1b]0;a", "y" * 300))] = holder.pop(key)
    elif how == "swap":
        other, name = rng.choice(there)
        try:
            holder[key] = copy.deepcopy(other[name])
        except (KeyError, IndexError):
            return
    else:
        holder[key] = copy.deepcopy(rng.choice(SCALARS))


def places(data: Any) -> Iterator[tuple[Any, Any]]:
    keys: Any = data if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ()
    for key in list(keys):
        yield data, key
        yield from places(data[key])
