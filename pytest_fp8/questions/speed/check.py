"""Is it really faster? The paired blocks of both arms, asked for until they decide, against the floor and the baseline.

docs/verdicts.md has the decision in ten sentences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import median
from typing import Any

from pytest_fp8.codes import S
from pytest_fp8.plan import Asking, TwoArms
from pytest_fp8.questions.findings import finding
from pytest_fp8.questions.speed import causes
from pytest_fp8.questions.speed.account import Account
from pytest_fp8.questions.speed.evidence import TimingEvidence, timing_for_baseline, timing_of
from pytest_fp8.questions.speed.timing import BlockTimer
from pytest_fp8.stats.components import MEASURED, Components, Session
from pytest_fp8.stats.estimate import Estimate, estimate_of, level, ratios_by_process
from pytest_fp8.stats.looks import GATE, GATED_CASES, RUNS_TO_FAIL, Outcome, against_floor, against_history
from pytest_fp8.verdicts import Decision, Figures, Finding, Verdict, passed

QUESTION = "speedup"
Row = tuple[str, list[Any], float | None]
"""A metric that was measured: name, values, and the tolerance of the case where that counts."""
CODES = {
    Verdict.NOT_EXERCISED: S.NO_BASELINE,
    Verdict.IMPROVED: S.FASTER_THAN_BASELINE,
    Verdict.FAIL: S.SLOWER_THAN_BASELINE,
}
"""Of what the baseline says."""


@dataclass(frozen=True)
class SpeedFigures(Figures):
    """Speedups are BF16's time over FP8's; those of steps, unless their names say ``gated``."""

    speedup: float
    low: float
    """Of the 99 % interval."""
    high: float
    bf16_ms: float
    """Milliseconds a step, the median of all blocks."""
    fp8_ms: float
    processes: int
    """Fresh pairs of them."""
    baseline: float | None
    host_bound: bool
    """Whether the host set an arm's pace, in this session or a stored one."""
    on_busy: bool
    """Whether busy time is judged, and not step time."""
    gated_speedup: float
    gated_baseline: float | None
    change: float | None
    """Against the baseline, as a fraction."""
    sessions: int
    """That the baseline has."""
    tolerance: float
    """The loss that was gated on."""
    account: Mapping[str, Any] | None
    notes: Sequence[str]
    base: Mapping[str, Any] | None = None
    """The comparison with base, where one was asked."""


def check_speedup(
    evidence: TimingEvidence,
    *,
    floor: float | None,
    tolerance: float,
    history: Sequence[Session] = (),
    components: Components = MEASURED,
    baseline_reference_ms: Sequence[Sequence[float]] = (),
    baseline_file: str = "",
    cases: int = GATED_CASES,
    busy_history: Sequence[Session] = (),
    host_bound: bool = False,
) -> Decision:
    """``floor``: the speedup to exceed, of step time; ``None`` asks the baseline. ``tolerance``: of a loss, a fraction.

    ``history``: the baseline's sessions, each the log ratios of its processes' blocks; ``components``: the variances of
    this GPU; ``baseline_reference_ms``: BF16's step times in each of these sessions. ``cases``: how many cases of this
    session are gated on speed; they share its false alarms. ``busy_history``: log ratios of busy time, where the
    baseline has them. ``host_bound``: whether a stored session is.

    Busy time is judged where this session or a stored one is host-bound and both have busy times; else step time.
    """
    steps, busy = ratios_by_process(evidence.bf16, evidence.fp8), evidence.busy_ratios()
    host_bound = host_bound or evidence.host_bound
    enough = bool(busy and busy_history) if history else len(busy) >= min(RUNS_TO_FAIL, len(steps))
    on_busy = floor is None and host_bound and enough
    run, held = (busy, busy_history if history else ()) if on_busy else (steps, history)
    known = components.of_busy() if on_busy else components
    here, timed = estimate_of(run, (), known), estimate_of(steps)
    result = Outcome(here, Verdict.NOT_EXERCISED, tolerance)
    if floor is not None:
        result = against_floor(run, floor, components=known, cases=cases)
    elif held:
        result = against_history(run, held, components=known, tolerance=tolerance, cases=cases, pairs=len(steps))
    account = evidence.account()
    figures = SpeedFigures(
        timed.ratio,
        *timed.interval,
        bf16_ms=float(median(chain.from_iterable(evidence.bf16))),
        fp8_ms=float(median(chain.from_iterable(evidence.fp8))),
        processes=len(evidence.fp8),
        baseline=math.exp(level(history)) if history else None,
        host_bound=host_bound,
        on_busy=on_busy,
        gated_speedup=here.ratio,
        gated_baseline=math.exp(level(held)) if held else None,
        change=result.estimate.change if held else None,
        sessions=len(held),
        tolerance=result.tolerance,
        account=account.numbers(on_busy) if account is not None else None,
        notes=_notes(evidence, here.ratio if on_busy else None),
    )
    found = causes.unsound(evidence, account, figures.bf16_ms, baseline_reference_ms, here.interval[0], on_busy)
    if found is None:
        seen = _seen(here, figures, account, result)
        against = baseline_file if floor is None and not held else _against(floor, tolerance, result, held)
        found = _explain(evidence, result, account, seen, against, floor, host_bound and not on_busy)
    return _with_account(found, account, on_busy).answer(QUESTION, figures)


def _with_account(found: Finding, account: Account | None, on_busy: bool) -> Finding:
    if account is None:
        return found
    if found.verdict is Verdict.PASS:
        return replace(found, headline=f"{found.headline}; {account.line(on_busy)}")
    return replace(found, seen=f"{found.seen}; {account.line(on_busy)}")


def _explain(
    evidence: TimingEvidence,
    result: Outcome,
    account: Account | None,
    seen: str,
    against: str,
    floor: float | None,
    host_decides: bool,
) -> Finding:
    """The rule's verdict with its lines. ``against``: the bounds in words. ``host_decides``: whether step times are
    judged that a host may have slowed."""
    verdict = result.verdict
    if verdict is Verdict.FAIL and floor is None and host_decides:
        # Nothing is stored that could tell a slow host from slow FP8.
        return finding(S.NO_BUSY_TIMES, against, seen, Verdict.INVALID)
    if verdict is Verdict.PASS:
        return passed("; ".join([seen, against, *_notes(evidence)]))
    if floor is None and verdict in CODES:
        return finding(CODES[verdict], against or "a stored baseline", seen, verdict)
    if verdict is Verdict.FAIL:
        code, cause = causes.why_slow(account, evidence)
    else:
        code, cause = causes.why_undecided(evidence, result.estimate, against_history=floor is None)
    bound = "baseline" if floor is None else "floor"
    return finding(code, against, seen, verdict, cause=cause, against=bound)


BUSY = "of busy time, since the host held up steps here or when the baseline was stored"


def _notes(evidence: TimingEvidence, busy: float | None = None) -> list[str]:
    """For below the table, which shows step times. ``busy``: the speedup where busy time is judged."""
    unwatched = evidence.beside.unwatched
    notes = [f"not watched on this GPU: {', '.join(unwatched)}"] if unwatched else []
    return notes if busy is None else [f"speedup judged: {busy:.3f}x {BUSY}", *notes]


def _seen(here: Estimate, figures: SpeedFigures, account: Account | None, result: Outcome) -> str:
    low, high = here.interval
    said = f"{here.ratio:.3f}x [{low:.3f}, {high:.3f}]"
    more = f"{figures.processes} process(es)"
    if figures.sessions:
        low, high = result.estimate.change_interval
        more += f"; {figures.change:+.1%} [{low:+.1%}, {high:+.1%}] against {figures.sessions} stored session(s)"
    steps = f"BF16 {figures.bf16_ms:.2f} ms, FP8 {figures.fp8_ms:.2f} ms a step"
    if not figures.on_busy or account is None:
        return f"{said}: {steps}; {more}"
    works = f"the GPU works {account.bf16.busy:.2f} and {account.fp8.busy:.2f} ms of it"
    return f"{said} {BUSY}; {figures.speedup:.3f}x of step time: {steps}, {works}; {more}"


def _against(floor: float | None, tolerance: float, result: Outcome, history: Sequence[Session]) -> str:
    """The bounds in words."""
    if floor is not None:
        return f"above floor {floor:.2f}x"
    held = f"above baseline {math.exp(level(history)):.3f}x less {100 * result.tolerance:.3g}%"
    if result.tolerance > tolerance:
        held += f" (its {len(history)} session(s) cannot hold {100 * tolerance:g}%)"
    return held


# -- what is asked ----------------------------------------------------------------------------------------------------


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
