"""Gathers evidence and judges it, and looks again while the verdict is INCONCLUSIVE."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

from pytest_fp8.verdicts import Verdict


class Judged(Protocol):
    @property
    def verdict(self) -> Verdict: ...


E = TypeVar("E")
J = TypeVar("J", bound=Judged)


def look_again(looks: Iterable[E], judge: Callable[[E], J]) -> tuple[E, J]:
    """Gather and judge, and look again while the verdict is INCONCLUSIVE and there are looks left.

    ``looks`` yields the evidence of each look when it is reached, and at least once.
    """
    for evidence in looks:
        judged = judge(evidence)
        if judged.verdict is not Verdict.INCONCLUSIVE:
            break
    return evidence, judged
