"""Asks for the speed: times both arms, judges, looks again while undecided; gives the rows that a baseline stores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

from pytest_fp8.plan import Asking, TwoArms
from pytest_fp8.questions.speed.account import Account
from pytest_fp8.questions.speed.check import check_speedup
from pytest_fp8.questions.speed.evidence import TimingEvidence, timing_for_baseline, timing_of
from pytest_fp8.questions.speed.timing import BlockTimer
from pytest_fp8.stats.components import Components
from pytest_fp8.stats.estimate import ratios_by_process
from pytest_fp8.stats.looks import GATE, RUNS_TO_FAIL
from pytest_fp8.verdicts import Decision, Verdict

Row = tuple[str, list[Any], float | None]
"""A metric that was measured: name, values, and the tolerance of the case where that counts."""


@dataclass
class SpeedQuestion:
    """The speed of one pair of arms, which is measured once for all that is asked of it."""

    arms: TwoArms
    host_bound: bool
    """Whether a stored session is host-bound, of the baseline or of the one that an update adds to."""
    history: Callable[[str], list[list[Any]]]
    """The baseline's sessions of a metric, oldest first; empty where there is none."""
    components: Components
    baseline_file: str
    gated_cases: int
    processes: int | None = None
    """Fresh pairs of processes to measure for a new baseline; ``None`` where the stored one is asked."""

    def __post_init__(self) -> None:
        # One for all cases with these arms: it has the blocks of what they have answered.
        self.timer = self.arms.once("blocks", self._new_timer)

    def _new_timer(self) -> BlockTimer:
        # The host may be quiet while the first pairs are timed, and busy later.
        return BlockTimer(self.arms, takes_busy=self.processes is not None or self.host_bound)

    def first_timing(self) -> Asking[TimingEvidence]:
        """The evidence of the first look, or all that a new baseline takes."""
        self._renew_profiled()
        return (yield from self._look(0))

    def _look(self, look: int) -> Asking[TimingEvidence]:
        """The evidence of one look of :data:`pytest_fp8.stats.looks.GATE`; of an update all that it takes."""
        if self.processes is not None:
            return timing_for_baseline(self.arms, self.timer, self.processes)
        return timing_of(self.arms, self.timer, look)

    def decide(self, floor: float | None) -> Asking[tuple[Decision, list[Row]]]:
        """The decision, and what a baseline stores of it. ``floor``: the speedup over BF16 to exceed; ``None``: the
        stored baseline is asked."""
        self._renew_profiled()
        against = floor is None and self.processes is None
        for look in range(len(GATE.pairs) if self.processes is None else 1):
            evidence = yield from self._look(look)
            decision = self._judge(evidence, floor, against)
            if decision.verdict is not Verdict.INCONCLUSIVE:
                break
        return decision, self._rows(evidence)

    def _renew_profiled(self) -> None:
        """Fresh processes where a test that was marked for another question has had the arms profiled."""
        if self.arms.answered("layers", "curve", "ledger", "numerics") and not self.arms.answered("timing"):
            self.arms.renew()

    def _judge(self, evidence: TimingEvidence, floor: float | None, against_baseline: bool) -> Decision:
        history = self.history("speedup") if against_baseline else ()
        return check_speedup(
            evidence,
            floor=floor,
            tolerance=self.arms.case.tolerance,
            history=history,
            components=self.components,
            baseline_reference_ms=self.history("bf16_ms") if history else (),
            baseline_file=self.baseline_file,
            cases=self.gated_cases,
            busy_history=self.history("busy_speedup") if against_baseline else (),
            host_bound=self.host_bound,
        )

    def _rows(self, evidence: TimingEvidence) -> list[Row]:
        """What a baseline stores, the metric that it is judged by first."""
        ratios, busy = ratios_by_process(evidence.bf16, evidence.fp8), evidence.busy_ratios()
        tolerance = self.arms.case.tolerance
        rows: list[Row] = [("speedup", ratios, tolerance)]
        if len(busy) >= RUNS_TO_FAIL:
            rows.append(("busy_speedup", busy, tolerance))
        on_busy = self._on_busy(evidence)
        return [
            *(reversed(rows) if on_busy else rows),
            ("bf16_ms", [float(median(x)) for x in evidence.bf16], None),
            ("fp8_ms", [float(median(x)) for x in evidence.fp8], None),
            *_account_rows(evidence.account(), on_busy),
        ]

    def _on_busy(self, evidence: TimingEvidence) -> bool:
        return (self.host_bound or evidence.host_bound) and len(evidence.busy_ratios()) >= RUNS_TO_FAIL


def _account_rows(account: Account | None, on_busy: bool) -> list[Row]:
    """Where a step went, for the tables of results. ``on_busy``: whether a baseline of this is gated on busy time."""
    if account is None:
        return []
    found = {"bf16_busy_ms": account.bf16.busy, "fp8_busy_ms": account.fp8.busy, "casts_ms": account.casts}
    if account.bf16.wire.rows:
        found |= {"bf16_wire_ms": account.bf16.wire.exposed, "fp8_wire_ms": account.fp8.wire.exposed}
    found |= {"earned_ms": account.earned, "speedup_limit": account.busy_limit if on_busy else account.limit}
    return [(name, [value], None) for name, value in found.items()]
