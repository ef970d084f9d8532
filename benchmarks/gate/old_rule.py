"""The speed rule of version 0.1, frozen, to compare with: it takes sessions on any machine as alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, median

from pytest_fp8.rules.statistics import median_variance, normal_quantile, pooled_variance, robust_sigma
from pytest_fp8.verdicts import Verdict

ALPHA, BETA, ALLOWANCE = 0.01, 0.05, 0.003
SIGMA_RUN, PRIOR = 0.003, 4
LOOKS = 4

Processes = Sequence[Sequence[float]]


def decide(run: Processes, baseline: Processes, tolerance: float, cases: int) -> Verdict:
    """``baseline``: the processes of its newest session alone."""
    mine, theirs = _variances(run, baseline)
    stored = median([median(x) for x in baseline])
    changes = [median(x) - stored for x in run]
    change, enough = fmean(changes), len(changes) >= 2
    error = math.sqrt(mine / len(run) + theirs * max(1 / len(baseline), median_variance(len(baseline))))
    q_fail, q_pass = normal_quantile(1 - ALPHA / (cases * (LOOKS - 1))), normal_quantile(1 - BETA / LOOKS)
    if change - q_fail * error > ALLOWANCE:
        return Verdict.IMPROVED if enough and min(changes) > ALLOWANCE else Verdict.INCONCLUSIVE
    if change - q_pass * error > math.log(1 - tolerance):
        return Verdict.PASS
    if enough and change + q_fail * error < -ALLOWANCE and max(changes) < -ALLOWANCE:
        return Verdict.FAIL
    return Verdict.INCONCLUSIVE


def _variances(run: Processes, stored: Processes) -> tuple[float, float]:
    noise = _mean_square([*run, *stored])
    mine = SIGMA_RUN**2 + max(noise, _mean_square(run)) * median_variance(min(map(len, run)))
    theirs = SIGMA_RUN**2 + noise * median_variance(min(map(len, stored)))
    freedom = len(run) - 1, len(stored) - 1
    if not sum(freedom):
        return mine, theirs
    expected = (freedom[0] * mine + freedom[1] * theirs) / sum(freedom)
    seen = pooled_variance([[median(x) for x in group] for group in (run, stored)]) / expected
    scale = max(1.0, (PRIOR + sum(freedom) * seen) / (PRIOR + sum(freedom)))
    return mine * scale, theirs * scale


def _mean_square(processes: Processes) -> float:
    return sum(robust_sigma(x) ** 2 * len(x) for x in processes) / sum(len(x) for x in processes)
