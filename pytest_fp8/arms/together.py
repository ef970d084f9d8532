"""Numbers of several ranks as those of all together. Pure."""

from __future__ import annotations

import math
import zlib
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import zip_longest
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


def steps_of_all(answers: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """What each rank said of the same steps (``worker.answers.busy.read_steps``) as one GPU's work: kernels that are no
    collectives of the rank where they take longest, and each collective as on the rank that waited least in it.

    A collective runs on a rank from when this rank comes to it until the last one has done so. What it takes the last
    one is its own time. The rest waits for a rank that works longer, whose kernels count, or whose host is late. On two
    H100s with 224 small all-reduces a step, 133 ms of a 377 ms step passed so, where 23 did while no host was late.
    """
    exposed = [_least(step) for step in zip(*(answer["exposed"] for answer in answers), strict=True)]
    computes = [
        max(busy - _total(mine) for busy, mine in step)
        for step in zip(*(zip(answer["busy_ms"], answer["exposed"], strict=True) for answer in answers), strict=True)
    ]
    return {
        "step_ms": [max(step) for step in zip(*(answer["step_ms"] for answer in answers), strict=True)],
        "busy_ms": [compute + _total(step) for compute, step in zip(computes, exposed, strict=True)],
        "exposed": exposed,
    }


def _least(ranks: Sequence[Sequence[tuple[str, float]]]) -> list[tuple[str, float]]:
    """Of one step: collective by collective. All ranks run those of a kind in one order; those of two kinds may begin
    in either. One that the others count to a neighbouring step is a rank's own."""
    kinds = dict.fromkeys(kind for rank in ranks for kind, _ in rank)
    return [
        (kind, min(each))
        for kind in kinds
        for each in zip_longest(*([ms for other, ms in rank if other == kind] for rank in ranks), fillvalue=math.inf)
    ]


def _total(exposed: Sequence[tuple[str, float]]) -> float:
    return sum(ms for _, ms in exposed)


def combined(fingerprints: Sequence[int]) -> int:
    return zlib.crc32(repr(list(fingerprints)).encode())


def mean_sketches(each: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """The mean over the ranks. One that has no gradient of a parameter adds nothing to it."""
    found = {}
    for name in dict.fromkeys(name for sketches in each for name in sketches):
        values = zip(*(of_text(sketches[name]) for sketches in each if name in sketches), strict=True)
        found[name] = in_text(array("f", (sum(value) / len(each) for value in values)))
    return found
