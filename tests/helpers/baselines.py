"""Baselines written by hand: the fields that each of them has, for tests that care about others; a sound one, a session
behind it, and what is read of them in a folder. Mutated files, too: bytes, JSON, and JSON with a digest that fits."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Iterator
from statistics import median
from typing import Any

from pytest_fp8.baselines.record import Baseline, StoredSession, digest
from pytest_fp8.baselines.store import Folder, read_baseline

ORIGIN = {
    "date": "2026-11-20",
    "commit": "0123456789ab",
    "dirty": False,
    "gpu": {"name": "NVIDIA H200", "driver": "580.1"},
    "libraries": {"torch": "1.0.0"},
    "reason": "first",
    "run": "0123456789ab",
}
"""Where a session comes from: every field that provenance must have."""


def session(metrics=None, **origin):
    """A stored session; a speedup gets the step times of its processes beside it. With busy times it is
    host-bound."""
    metrics = dict(metrics or {"fp8_share": [0.5]})
    if "speedup" in metrics and "bf16_ms" not in metrics:
        metrics["bf16_ms"] = [100.0] * len(metrics["speedup"])
    if "speedup" in metrics and "fp8_ms" not in metrics:
        pairs = zip(metrics["bf16_ms"], metrics["speedup"], strict=True)
        metrics["fp8_ms"] = [ms / math.exp(median(blocks)) for ms, blocks in pairs]
    return StoredSession(**{**ORIGIN, **origin}, metrics=metrics, host_bound="busy_speedup" in metrics)


def baseline(case, case_hash, gpu="h200", metrics=None, **origin):
    """A baseline of one session."""
    return Baseline(case, case_hash, gpu, (session(metrics=metrics, **origin),))


def edit(path, change, sign=True):
    """Change a file by hand: ``change`` gets its data. With ``sign`` the digest is made to fit, as a forger would."""
    data = json.loads(path.read_text())
    change(data)
    if sign:
        data["digest"] = digest(data)
    path.write_text(json.dumps(data))


GOOD = baseline("1b-torchao-rowwise", "abc", metrics={"speedup": [[0.1, 0.11], [0.12, 0.1]], "fp8_share": [0.78]})
LATER = session(metrics={"fp8_share": [0.8]}, date="2026-11-21", run="b" * 12)


def read(folder, gpu="h200", case="1b-torchao-rowwise", case_hash="abc"):
    source = folder if isinstance(folder, Folder) else Folder(folder)
    return read_baseline(source, gpu, case, case_hash)


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
