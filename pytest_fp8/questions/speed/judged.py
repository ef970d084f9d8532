"""Whether a speedup is judged by step time or by busy time. Pure."""

from __future__ import annotations

import math
from dataclasses import replace

from pytest_fp8.questions.speed.evidence import TimingEvidence
from pytest_fp8.rules.speed import LOOKS, Speedup
from pytest_fp8.verdicts import Verdict


def judged(
    evidence: TimingEvidence, steps: Speedup, busy: Speedup | None, floor: float | None, stored: bool
) -> tuple[bool, Speedup]:
    """Whether busy time is judged, and the result. ``busy``: that of busy times, where enough pairs of processes have
    them; ``stored``: whether the baseline has."""
    processes = len(evidence.fp8)
    if busy is None:
        more = stored and bool(evidence.fp8_busy and evidence.fp8_busy[-1]) and processes < LOOKS[-1][0]
        # The next pair has busy times, too, which may exclude a change.
        wait = more and steps.verdict in (Verdict.FAIL, Verdict.IMPROVED)
        return False, replace(steps, verdict=Verdict.INCONCLUSIVE) if wait else steps
    if evidence.waits():
        return (False, steps) if _steps_answer(steps, busy, floor, processes) else (True, busy)
    if _steps_hold(steps, busy, processes):
        return False, steps
    return True, replace(busy, verdict=Verdict.INCONCLUSIVE) if _shows_a_part(steps, busy) else busy


def _shows_a_part(steps: Speedup, busy: Speedup) -> bool:
    """Whether busy times, which are coarser, pass though they show half of the loss that steps fail for."""
    lost = busy.change is not None and busy.change.theta < math.log(1 - steps.tolerance) / 2
    return lost and steps.verdict is Verdict.FAIL and busy.verdict is Verdict.PASS


def _steps_answer(steps: Speedup, busy: Speedup, floor: float | None, processes: int) -> bool:
    """Whether step time answers for the floor: where it decides, and while a further pair of processes may decide. Busy
    times answer at once where steps lie above the floor and busy times prove it."""
    if floor is None:
        return False
    above = steps.here.ratio >= floor and busy.verdict is Verdict.PASS
    return steps.verdict is not Verdict.INCONCLUSIVE or (processes < LOOKS[-1][0] and not above)


def _steps_hold(steps: Speedup, busy: Speedup, processes: int) -> bool:
    """Whether step time answers where no arm waits: unless all pairs of processes decide nothing against the baseline,
    or show a loss or gain that busy times exclude."""
    if steps.change is None or busy.change is None:
        return True
    if steps.verdict is Verdict.INCONCLUSIVE:
        return processes < LOOKS[-1][0]
    return steps.verdict is Verdict.PASS or abs(steps.change.theta - busy.change.theta) <= busy.change.half_width()
