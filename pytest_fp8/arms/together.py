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
    """What each rank said of the same steps (``worker.record.clock.read_steps``) as one GPU's work, without what
    collectives wait for a late host.

    A collective runs on a rank from when this rank comes to it until the last one has done so. What it takes the rank
    that waits least is its own time; the rest waits for a rank that computes for longer, or whose host is late. It is
    left out as far as the other ranks' GPUs stood idle: behind a late host one does, and where ranks compute in turn
    none does. On two H100s with 224 small all-reduces a step and late hosts, 133 ms of a 377 ms step were collectives
    that nothing hid; 23 of 361 where none was late.
    """
    kinds = ("step_ms", "busy_ms", "compute_ms", "collectives")
    if len({len(answer["step_ms"]) for answer in answers}) > 1:
        # A profile that lost a mark: its steps are not the others'.
        slowest = max(answers, key=lambda answer: sum(answer["step_ms"]))
        return {**{kind: slowest[kind] for kind in kinds}, "collectives": []}
    told = {kind: list(zip(*(answer[kind] for answer in answers), strict=True)) for kind in kinds}
    computes = list(map(max, told["compute_ms"]))
    own = [compute + _least(step) for compute, step in zip(computes, told["collectives"], strict=True)]
    busy = map(max, own, map(_without_idle, told["step_ms"], told["busy_ms"]))
    return {
        "step_ms": list(map(max, told["step_ms"])),
        "busy_ms": list(busy),
        "compute_ms": computes,
        "collectives": [],
    }


def _least(ranks: Sequence[Sequence[tuple[str, float]]]) -> float:
    """Of one step: milliseconds of its collectives, of each on the rank where it takes least. All ranks run those of a
    kind in one order; those of two kinds may begin in either. One that the others count to a neighbouring step is a
    rank's own."""
    total = 0.0
    for kind in {kind for rank in ranks for kind, _ in rank}:
        each = ([ms for other, ms in rank if other == kind] for rank in ranks)
        total += sum(map(min, zip_longest(*each, fillvalue=math.inf)))
    return total


def _without_idle(steps: Sequence[float], busy: Sequence[float]) -> float:
    """Of one step: what a rank is busy at least, if its collectives waited whenever another rank's GPU was idle."""
    idle = [max(0.0, step - works) for step, works in zip(steps, busy, strict=True)]
    return max(works + mine - sum(idle) for works, mine in zip(busy, idle, strict=True))


def combined(fingerprints: Sequence[int]) -> int:
    return zlib.crc32(repr(list(fingerprints)).encode())


def mean_sketches(each: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """The mean over the ranks. One that has no gradient of a parameter adds nothing to it."""
    found = {}
    for name in dict.fromkeys(name for sketches in each for name in sketches):
        values = zip(*(of_text(sketches[name]) for sketches in each if name in sketches), strict=True)
        found[name] = in_text(array("f", (sum(value) / len(each) for value in values)))
    return found
