"""Numbers of several ranks as those of all together. Pure."""

from __future__ import annotations

import zlib
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from pytest_fp8.floats import in_text, of_text


def summed(each: Sequence[Mapping[str, Mapping[str, int]]]) -> dict[str, dict[str, int]]:
    """Numbers under two keys, of all ranks together."""
    found: dict[str, Counter[str]] = {}
    for counts in each:
        for owner, mine in counts.items():
            found.setdefault(owner, Counter()).update(mine)
    return {owner: dict(counts) for owner, counts in found.items()}


def largest(each: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The largest number under each key of any."""
    return {key: max(one[key] for one in each if key in one) for key in {k: 0 for one in each for k in one}}


def means(each: Sequence[Sequence[float]]) -> list[float]:
    """Of numbers step by step: the mean over the whole batch, of which every rank has an equal part."""
    return [sum(values) / len(values) for values in zip(*each, strict=True)]


def combined(fingerprints: Sequence[int]) -> int:
    return zlib.crc32(repr(list(fingerprints)).encode())


def mean_sketches(each: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """The mean over the ranks. One that has no gradient of a parameter adds nothing to it."""
    found = {}
    for name in dict.fromkeys(name for sketches in each for name in sketches):
        values = zip(*(of_text(sketches[name]) for sketches in each if name in sketches), strict=True)
        found[name] = in_text(array("f", (sum(value) / len(each) for value in values)))
    return found
