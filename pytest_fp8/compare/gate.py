"""The comparison with base in a test session: what `assert_speedup` adds under --fp8-base."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_fp8.codes import S
from pytest_fp8.compare.session import Model, Side, compare_in, environments
from pytest_fp8.questions.speed.check import SpeedFigures
from pytest_fp8.verdicts import Decision, Verdict

if TYPE_CHECKING:
    from pytest_fp8.arms.environment import ArmEnvironment
    from pytest_fp8.arms.pool import ArmPool
    from pytest_fp8.case import Case
    from pytest_fp8.compare.session import Comparison


class BaseGate:
    """Base's FP8 arm beside head's, case by case. The checkout lives until ``held`` is closed."""

    def __init__(self, base: Side, project: Path, pool: Callable[[], ArmPool], held: ExitStack) -> None:
        self._base, self._project, self._pool, self._held = base, project, pool, held
        self._sides: tuple[ArmEnvironment, ArmEnvironment] | None = None

    def compare(self, case: Case, model: Model, cases: int) -> Comparison:
        """``cases`` of the session share its false alarms. Raises :class:`ArmError`, and :class:`SettingsError` where
        base cannot be had."""
        if self._sides is None:
            self._sides = environments(self._base, Side(), self._project, self._held)
        return compare_in(self._pool(), case, model, self._sides, cases=cases)


def with_base(stored: Decision, compared: Comparison) -> Decision:
    """The comparison with base decides; the stored baseline is the coarse guard behind it, against slow creep. Pure.

    A FAIL or INVALID of the stored one stands. What it leaves open, the comparison answers; so it does on a host of
    which the stored figures say nothing.
    """
    decision = compared.decision
    figures = stored.figures
    if isinstance(figures, SpeedFigures):
        figures = replace(figures, base=compared.to_json())
    if stored.verdict in (Verdict.FAIL, Verdict.INVALID) and stored.code is not S.OTHER_REFERENCE:
        return replace(stored, figures=figures)
    seen = f"{decision.seen or decision.headline} against base; against the stored baseline: {stored.headline}"
    headline = f"{decision.headline}; {seen}" if decision.verdict is Verdict.PASS else decision.headline
    return replace(decision, question=stored.question, headline=headline, seen=seen, figures=figures)
