"""Is it really faster? The paired blocks of both arms against the floor and the baseline. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from pytest_fp8.codes import S
from pytest_fp8.questions.layers.kernels import kernel_family
from pytest_fp8.questions.speed import causes
from pytest_fp8.questions.speed.account import Account
from pytest_fp8.questions.speed.beside import disturbance
from pytest_fp8.questions.speed.evidence import TimingEvidence, enough_busy
from pytest_fp8.questions.speed.host import scattered
from pytest_fp8.questions.speed.judged import judged
from pytest_fp8.questions.speed.sound import not_fp8s_own
from pytest_fp8.rules.change import Change, level
from pytest_fp8.rules.speed import GATED_CASES, Speedup, decide_speedup, ratios_by_process
from pytest_fp8.rules.variance import MEASURED, Components, Session
from pytest_fp8.verdicts import Decision, Figures, Finding, Verdict, passed

QUESTION = "speedup"
BAND = 0.08
"""How far the reference's own step time may lie, in log, from that of the nearest session of its baseline. Eleven H200s
took 118.1 to 125.3 ms for one and the same step of 1B: their logs scatter by 2.0 %, so that two of them lie more than
8 % apart in one of 200 pairs."""
NEAR = 0.05
"""Where BF16 is slower by more than this, a small loss is not held against FP8: what makes BF16 slower may make FP8
slower by more. With a pause added to both arms' steps on an H200, BF16 took 7.3 % longer and FP8 9.6 %."""
SMALL = 0.5
"""Such a loss, as a share of how much slower BF16 is: 0.30 in that run."""


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
    clocks_mhz: Sequence[int]
    unwatched: Sequence[str]
    """What of the GPU's state its driver did not tell."""
    scattered: str
    """The blocks where they scatter as on a busy host, in words."""
    bf16_gpu_ms: Mapping[str, float]
    """Class of kernels -> milliseconds in the profiled step; likewise of FP8."""
    fp8_gpu_ms: Mapping[str, float]
    on_busy: bool
    """Whether busy time is judged."""
    gated_on: str
    """``busy time`` or ``step time``."""
    gated_speedup: float
    gated_baseline: float | None
    change: float | None
    """Against the baseline, as a fraction, with the standard errors of its logarithm."""
    change_error: float | None
    own_error: float | None
    """Of it, what comes of processes and not of sessions."""
    sessions: int
    """That the baseline has."""
    tolerance: float
    """The loss that was gated on."""
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
) -> Decision:
    """``floor``: the speedup to exceed; ``None`` asks the baseline. ``tolerance``: of a loss, as a fraction.

    ``history``: the baseline's sessions, each the log ratios of its processes' blocks; ``components``: the variances of
    this GPU; ``baseline_reference_ms``: BF16's step times in each of these sessions. ``cases``: how many cases of this
    session are gated on speed; they share its false alarms. ``busy_history``: log ratios of busy time, where the
    baseline has them.

    Where an arm waits for its host, the baseline is asked for busy time: the host hardly changes it. So it is where all
    pairs of step times decide nothing against the baseline, or show a loss or gain that busy times exclude. A baseline
    without busy times is asked for step time all the same. The floor is asked of step times; busy times answer where
    these do not decide.
    """
    processes = ratios_by_process(evidence.bf16, evidence.fp8)
    decide = partial(decide_speedup, components=components, tolerance=tolerance, floor=floor, cases=cases)
    steps = decide(processes, history=history)
    stored = history
    account, busy = evidence.account(), enough_busy(evidence) if busy_history or not history else []
    of_busy = busy_history if history else ()
    by_busy = decide(busy, history=of_busy, components=components.of_busy()) if busy else None
    on_busy, result = judged(evidence, steps, by_busy, floor, bool(busy_history))
    history = of_busy if on_busy else history
    why = causes.why_busy(account, evidence.waits())
    figures = _figures(evidence, steps, result, stored, history, on_busy, why)
    found = disturbed(evidence, figures.bf16_ms, () if on_busy else baseline_reference_ms)
    found = found or not_fp8s_own(account, evidence, result.here.interval[0], on_busy)
    if found is None:
        seen = _seen(result, figures, account if on_busy else None, why)
        seen += f"; {_processes(processes, busy if on_busy else processes)}"
        if result.change is not None:
            seen += f"; {_change(result.change)} against the baseline of {len(history)} session(s)"
        against = _against(floor, tolerance, result, history)
        lost = result.verdict is Verdict.FAIL and result.reason == "baseline" and not on_busy
        found = causes.slower_by_the_host(account, seen, against) if lost else None
        found = found or (_slow_host(figures.bf16_ms, baseline_reference_ms, result) if lost else None)
        found = found or _explain(evidence, result, account, seen, against, baseline_file)
    if account is not None:
        line = account.line(on_busy)
        if found.verdict is Verdict.PASS:
            found = replace(found, headline=f"{found.headline}; {line}")
        else:
            found = replace(found, seen=f"{found.seen}; {line}")
    return found.answer(QUESTION, figures)


def _figures(
    evidence: TimingEvidence,
    steps: Speedup,
    result: Speedup,
    stored: Sequence[Session],
    history: Sequence[Session],
    on_busy: bool,
    why: str,
) -> SpeedFigures:
    """``steps``: the decision by step times; ``result``: the one that counts. ``stored`` and ``history``: the sessions
    that each was held against; ``why``: the reason for busy time."""
    account = evidence.account()
    change, (low, high) = result.change, steps.here.interval
    return SpeedFigures(
        speedup=steps.here.ratio,
        low=low,
        high=high,
        bf16_ms=float(np.median(np.concatenate([np.asarray(x) for x in evidence.bf16]))),
        fp8_ms=float(np.median(np.concatenate([np.asarray(x) for x in evidence.fp8]))),
        processes=len(evidence.fp8),
        baseline=math.exp(level(stored)) if stored else None,
        clocks_mhz=list(evidence.clocks),
        unwatched=list(evidence.unwatched),
        scattered=scattered(evidence.bf16, evidence.fp8, evidence.turns).told,
        bf16_gpu_ms=dict(evidence.bf16_gpu.milliseconds),
        fp8_gpu_ms=dict(evidence.fp8_gpu.milliseconds),
        on_busy=on_busy,
        gated_on="busy time" if on_busy else "step time",
        gated_speedup=result.here.ratio,
        gated_baseline=math.exp(level(history)) if history else None,
        change=math.expm1(change.theta) if change else None,
        change_error=change.error if change else None,
        own_error=change.own_error if change else None,
        sessions=len(history),
        tolerance=result.tolerance,
        waits_for_host=causes.launch_bound(account.fp8) if account is not None else "",
        account=account.numbers(on_busy) if account is not None else None,
        notes=_notes(result, account, on_busy, why) + ([_unwatched(evidence)] if evidence.unwatched else []),
    )


def _unwatched(evidence: TimingEvidence) -> str:
    return f"not watched on this GPU: {', '.join(evidence.unwatched)}"


def _processes(timed: Session, judged: Session) -> str:
    of_some = f", busy times of {len(judged)} of them" if len(judged) < len(timed) else ""
    few, many = min(map(len, timed)), max(map(len, timed))
    blocks = f"{many}" if few == many else f"{few} to {many}"
    return f"{len(timed)} process(es) of {blocks} blocks{of_some}"


def _notes(result: Speedup, account: Account | None, on_busy: bool, why: str) -> list[str]:
    """For below the table, which shows step times. ``why``: the reason for busy time, if it is judged."""
    if account is None:
        return []
    works = f"the GPU works {account.fp8.busy:.0f} ms of FP8's {account.fp8.step:.0f} ms step"
    busy = f"speedup judged by busy time, {result.here.ratio:.3f}x, {why}: {works}"
    return [note for note in (busy if on_busy else "", causes.fused_reduction(account)) if note]


def _seen(result: Speedup, figures: SpeedFigures, busy: Account | None, why: str) -> str:
    """``busy``: the account, where busy time is asked; ``why``: the reason for it."""
    low, high = result.here.interval
    if busy is None:
        return (
            f"{result.here.ratio:.3f}x [{low:.3f}, {high:.3f}]: BF16 {figures.bf16_ms:.2f} ms, "
            f"FP8 {figures.fp8_ms:.2f} ms a step"
        )
    return (
        f"{result.here.ratio:.3f}x [{low:.3f}, {high:.3f}] of busy time, {why}: the GPU works "
        f"{busy.bf16.busy:.2f} ms of BF16's {busy.bf16.step:.2f} ms step and {busy.fp8.busy:.2f} ms of FP8's "
        f"{busy.fp8.step:.2f} ms; {figures.speedup:.3f}x of step time"
    )


def _explain(
    evidence: TimingEvidence, result: Speedup, account: Account | None, seen: str, against: str, baseline_file: str
) -> Finding:
    """The rule's verdict with its lines. ``against``: the bounds in words."""
    lines = {"expected": against, "seen": seen}
    if result.verdict is Verdict.PASS:
        unwatched = f"; {_unwatched(evidence)}" if evidence.unwatched else ""
        return passed(f"{seen}; {against}{unwatched}")
    if result.verdict is Verdict.IMPROVED:
        return Finding(
            S.FASTER_THAN_BASELINE,
            Verdict.IMPROVED,
            **lines,
            headline="FP8 is faster than its baseline",
            cause="a library, a kernel or the model's FP8 path became faster; the old baseline no longer guards that",
            next_step='update the baseline: --fp8-update="faster since ..."',
        )
    if result.verdict is Verdict.NOT_EXERCISED:
        return Finding(
            S.NO_BASELINE,
            Verdict.NOT_EXERCISED,
            headline="no baseline to hold the speedup against",
            expected=baseline_file or "a stored baseline",
            seen=seen,
            cause="this case was never stored for this GPU",
            next_step='run once with --fp8-update="first measurement"',
        )
    if result.verdict is Verdict.FAIL and result.reason == "baseline":
        return Finding(
            S.SLOWER_THAN_BASELINE,
            Verdict.FAIL,
            **lines,
            headline="FP8 lost speed against BF16 since the baseline",
            cause="the FP8 arm became slower while BF16 did not: a library, a kernel choice or the model's FP8 path",
            next_step="compare library versions with the baseline's provenance; then the layers question",
        )
    if result.verdict is Verdict.FAIL:
        headline = "FP8 is not faster than the best BF16"
        why = causes.why_slow(account, evidence.fp8_compiled, evidence.turns)
    else:
        headline = f"the blocks do not decide against the {result.reason}"
        why = causes.why_undecided(evidence, result, account)
    return Finding(why.code, result.verdict, headline, against, seen, why.cause, why.next_step)


def disturbed(evidence: TimingEvidence, bf16_ms: float, baseline_ms: Sequence[Sequence[float]]) -> Finding | None:
    """Why the blocks cannot be used, or ``None``. ``baseline_ms``: BF16's step times stored in the baseline."""
    found = disturbance(evidence.strangers, evidence.throttles, evidence.clocks)
    return found or _other_attention(evidence) or _outside_band(bf16_ms, baseline_ms)


def _other_attention(evidence: TimingEvidence) -> Finding | None:
    bf16, fp8 = _attention(evidence.bf16_attention), _attention(evidence.fp8_attention)
    if bf16 == fp8:
        return None
    two_cudnn = evidence.bf16_cudnn != evidence.fp8_cudnn
    return Finding(
        S.OTHER_ATTENTION,
        Verdict.INVALID,
        headline="the arms ran different attention kernels",
        expected=f"the same kernels in both arms; FP8 ran {', '.join(fp8) or 'none'}",
        seen=f"the reference ran {', '.join(bf16) or 'none'}",
        cause=f"two cuDNN libraries: {evidence.bf16_cudnn} in the reference, {evidence.fp8_cudnn} in the FP8 arm"
        if two_cudnn
        else "one arm lost its fast attention path, so the ratio measures attention and not FP8",
        next_step="point CUDNN_HOME at torch's own cuDNN, or pin the attention backend in both arms",
    )


def _slow_host(bf16_ms: float, baseline_ms: Sequence[Sequence[float]], result: Speedup) -> Finding | None:
    """A small loss where BF16 is rather slow."""
    slower = min((math.log(bf16_ms / median(session)) for session in baseline_ms), default=0.0)
    small = result.change is not None and -result.change.theta <= SMALL * slower
    return _outside_band(bf16_ms, baseline_ms, NEAR) if slower > NEAR and small else None


def _outside_band(bf16_ms: float, baseline_ms: Sequence[Sequence[float]], band: float = BAND) -> Finding | None:
    stored = sorted(median(session) for session in baseline_ms)
    if not stored or min(abs(math.log(bf16_ms / each)) for each in stored) <= band:
        return None
    sessions = f"{stored[0]:.2f}" if len(stored) == 1 else f"{stored[0]:.2f} to {stored[-1]:.2f}"
    return Finding(
        S.OTHER_REFERENCE,
        Verdict.INVALID,
        headline="the BF16 reference is outside its own band",
        expected=f"{sessions} ms a step +-{band:.0%}, as in {len(stored)} stored session(s)",
        seen=f"{bf16_ms:.2f} ms",
        cause="another host, power limit or BF16 library: a ratio to it says nothing about FP8",
        next_step="compare driver and libraries with the baseline's provenance; measure anew if they moved",
    )


def _attention(operators: Mapping[str, Sequence[str]]) -> list[str]:
    """Families of the kernels, whatever operator launched them. One kernel is reached through
    ``scaled_dot_product_attention`` in an eager arm and through cuDNN's own operator in a compiled one."""
    return sorted({kernel_family(kernel) for kernels in operators.values() for kernel in kernels})


def _change(change: Change) -> str:
    """``-3.1% [-4.4%, -1.8%]``: the change against the baseline, with a 99 % interval that includes the difference
    between sessions and the baseline's own noise."""
    low, high = change.theta - change.half_width(), change.theta + change.half_width()
    return f"{math.expm1(change.theta):+.1%} [{math.expm1(low):+.1%}, {math.expm1(high):+.1%}]"


def _against(floor: float | None, tolerance: float, result: Speedup, history: Sequence[Session]) -> str:
    parts = []
    if history:
        held = f"baseline {math.exp(level(history)):.3f}x less {100 * result.tolerance:.3g}%"
        if result.tolerance > tolerance:
            held += f" (its {len(history)} session(s) cannot hold {100 * tolerance:g}%)"
        parts.append(held)
    if floor is not None:
        parts.append(f"floor {floor:.2f}x")
    return "above " + " and ".join(parts) if parts else "nothing to compare with"
