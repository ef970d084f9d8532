"""Is it really faster? The paired blocks of both arms against the floor and the baseline. Pure.

docs/verdicts.md has the decision in ten sentences.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import median
from typing import Any

from pytest_fp8.codes import S
from pytest_fp8.questions.findings import finding
from pytest_fp8.questions.speed import causes
from pytest_fp8.questions.speed.account import Account
from pytest_fp8.questions.speed.evidence import TimingEvidence
from pytest_fp8.questions.speed.timing import scattered
from pytest_fp8.stats.components import MEASURED, Components, Session
from pytest_fp8.stats.estimate import Estimate, estimate_of, level, ratios_by_process
from pytest_fp8.stats.looks import GATED_CASES, RUNS_TO_FAIL, Outcome, against_floor, against_history
from pytest_fp8.verdicts import Decision, Figures, Finding, Verdict, passed

QUESTION = "speedup"
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
    scattered: str
    """The blocks where they scatter by the host, in words."""
    waits_for_host: str
    """Why FP8's step waits, in words."""
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
        scattered=scattered(evidence.bf16, evidence.fp8),
        waits_for_host=causes.launch_bound(account.fp8) if account is not None else "",
        account=account.numbers(on_busy) if account is not None else None,
        notes=_notes(evidence, here, account if on_busy else None),
    )
    found = causes.unsound(evidence, account, figures.bf16_ms, baseline_reference_ms, here.interval[0], on_busy)
    if found is None:
        seen = f"{_seen(here, figures, account)}; {_processes(steps, run)}{_change(result, held)}"
        against = baseline_file if floor is None and not held else _against(floor, tolerance, result, held)
        found = _explain(evidence, result, account, seen, against, floor, host_bound and not on_busy)
    return _with_account(found, account, on_busy).answer(QUESTION, figures)


def _with_account(found: Finding, account: Account | None, on_busy: bool) -> Finding:
    """``found`` with where the steps' time goes behind it."""
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
        return passed("; ".join(filter(None, (seen, against, _unwatched(evidence)))))
    if floor is None and verdict in CODES:
        return finding(CODES[verdict], against or "a stored baseline", seen, verdict)
    if verdict is Verdict.FAIL:
        code, cause = causes.why_slow(account, evidence)
    else:
        code, cause = causes.why_undecided(evidence, result.estimate, against_history=floor is None)
    bound = "baseline" if floor is None else "floor"
    return finding(code, against, seen, verdict, cause=cause, against=bound)


def _unwatched(evidence: TimingEvidence) -> str:
    return f"not watched on this GPU: {', '.join(unwatched)}" if (unwatched := evidence.beside.unwatched) else ""


def _change(result: Outcome, held: Sequence[Session]) -> str:
    """With a 99 % interval that includes the difference between sessions and the baseline's own noise."""
    if not held:
        return ""
    low, high = result.estimate.change_interval
    return f"; {result.estimate.change:+.1%} [{low:+.1%}, {high:+.1%}] against the baseline of {len(held)} session(s)"


def _processes(timed: Session, judged: Session) -> str:
    of_some = f", busy times of {len(judged)} of them" if len(judged) < len(timed) else ""
    few, many = min(map(len, timed)), max(map(len, timed))
    blocks = f"{many}" if few == many else f"{few} to {many}"
    return f"{len(timed)} process(es) of {blocks} blocks{of_some}"


def _notes(evidence: TimingEvidence, judged: Estimate, busy: Account | None) -> list[str]:
    """For below the table, which shows step times. ``busy``: the account where busy time is judged."""
    notes = [_unwatched(evidence)] if _unwatched(evidence) else []
    if busy is None:
        return notes
    works = f"the GPU works {busy.fp8.busy:.0f} ms of FP8's {busy.fp8.step:.0f} ms step"
    return [f"speedup judged by busy time, {judged.ratio:.3f}x, {causes.why_busy(busy)}: {works}", *notes]


def _seen(here: Estimate, figures: SpeedFigures, account: Account | None) -> str:
    low, high = here.interval
    said = f"{here.ratio:.3f}x [{low:.3f}, {high:.3f}]"
    if not figures.on_busy or account is None:
        return f"{said}: BF16 {figures.bf16_ms:.2f} ms, FP8 {figures.fp8_ms:.2f} ms a step"
    return (
        f"{said} of busy time, {causes.why_busy(account)}: the GPU works "
        f"{account.bf16.busy:.2f} ms of BF16's {account.bf16.step:.2f} ms step and {account.fp8.busy:.2f} ms of FP8's "
        f"{account.fp8.step:.2f} ms; {figures.speedup:.3f}x of step time"
    )


def _against(floor: float | None, tolerance: float, result: Outcome, history: Sequence[Session]) -> str:
    """The bounds in words."""
    if floor is not None:
        return f"above floor {floor:.2f}x"
    held = f"above baseline {math.exp(level(history)):.3f}x less {100 * result.tolerance:.3g}%"
    if result.tolerance > tolerance:
        held += f" (its {len(history)} session(s) cannot hold {100 * tolerance:g}%)"
    return held
