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
TEXTS = (b"", b"NaN", b"-Infinity", b"1e999", b"[" * 3000, b'{"a":' * 3000, b"\xff", b"\x00", b"//")


def mutants(text: str, count: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """``count`` mutated files: how it was done, and the bytes."""
    rng = random.Random(seed)
    for index in range(count):
        way = ("bytes", "json", "signed")[index % 3]
        yield way, _bytes(text.encode(), rng) if way == "bytes" else _json(json.loads(text), rng, way == "signed")


def _bytes(data: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(data) + 1)
    end = start + rng.choice((0, 1, 4, 30, 1000))
    part = data[start:end]
    return data[:start] + rng.choice((part + part, part[::-1], bytes([rng.randrange(256)]), *TEXTS)) + data[end:]


def _json(data: Any, rng: random.Random, sign: bool) -> bytes:
    """One value somewhere in ``data`` is removed, that of another place, a little another number, or any other."""
    there = list(places(data))
    (holder, key), (other, name) = rng.choice(there), rng.choice(there)
    value, how = holder[key], rng.choice(("remove", "swap", "nudge", "replace", "replace"))
    if how == "remove":
        del holder[key]
    elif how == "nudge" and type(value) in (int, float):
        holder[key] = rng.choice((value + 1, value * 1.001, -value, value * 1e6, str(value)))
    else:
        holder[key] = copy.deepcopy(other[name] if how == "swap" else rng.choice(SCALARS))
    if sign and isinstance(data, dict):
        try:
            data["digest"] = digest(data)
        except (ValueError, TypeError):
            data["digest"] = "0" * 64
    return json.dumps(data).encode()


def places(data: Any) -> Iterator[tuple[Any, Any]]:
    keys: Any = data if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ()
    for key in list(keys):
        yield data, key
        yield from places(data[key])
