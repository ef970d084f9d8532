"""The rule on sessions that were measured: each repeated one of a case is gated against those before it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.gate.rules import ours
from benchmarks.gate.simulate import SESSION
from pytest_fp8.stats.components import MEASURED, Session
from pytest_fp8.stats.estimate import figure, level


@dataclass(frozen=True)
class Replayed:
    """One session of a case: how far it lay from the sessions before it, and what the rule says."""

    case: str
    stored: int
    change: float
    ours: str


def replay(histories: Mapping[str, Mapping[str, Session]], tolerance: float) -> list[Replayed]:
    """``histories``: case -> session -> its processes, oldest session first."""
    rule = ours(MEASURED, tolerance, SESSION)
    found = []
    for case, sessions in histories.items():
        taken: Sequence[Session] = list(sessions.values())
        for index in range(1, len(taken)):
            run, history = taken[index], taken[:index]
            change = math.expm1(figure(run) - level(history))
            found.append(Replayed(case, index, change, rule(run, history).value))
    return found
