"""The speed rule: measured log ratios of BF16's step time over FP8's, against a floor and a stored baseline. Pure.

Two estimators of a speedup's error live in this file, and nowhere else:

- The gate's (:func:`process_variances`) decides PASS and FAIL of a session against a floor and a baseline. It corrects
  the spread for few values, pools the noise of run and baseline, and weighs what few processes show between them.
- The plain one (:func:`speed_of`) serves the comparison of two sides in one session and the review of a new baseline
  against an old one. It takes each measurement by itself: SE^2 = (pi/2) sigma_w^2 / (R n) + sigma_run^2 / R, with an
  uncorrected sigma_w. The gate's correction would widen its intervals and change verdicts that users already have.

Loads no numpy: the command line, which must answer at once, needs some of this.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from pytest_fp8.rules.statistics import (
    MAD_TO_SIGMA,
    SIGMA_RUN_FLOOR,
    median_variance,
    normal_quantile,
    pooled_variance,
    robust_sigma,
    sample_sd,
)
from pytest_fp8.verdicts import Verdict

ALPHA = 0.01
"""Chance that a session calls any healthy case a regression: over all its gated cases and all their looks."""
GATED_CASES = 30
"""Cases that share ``ALPHA`` where a caller does not say how many there are."""
BETA = 0.05
"""Chance that a loss of exactly the tolerance passes, over all looks."""
POWER = 0.50
"""Chance, at the last look, that a loss of the tolerance fails: the least that a baseline must offer to be stored. A
baseline that offers just this fails a loss of 1.5 tolerances 98 % of the time. Refusing it would gate nothing."""
LOOKS: tuple[tuple[int, int], ...] = ((1, 6), (2, 6), (3, 6), (4, 6))
"""(fresh processes, ABBA blocks per process) of each look. Further blocks of one process buy little: they do not touch
the spread between processes. The first look can pass a case, and never fail one."""
RUNS_TO_FAIL = 2
"""A finding needs this many processes, and each of them must show it: one process may be slow by chance."""
BASELINE_BLOCKS = 8
"""ABBA blocks of each process of a baseline. It is measured once and used often, so it may cost more."""
SIGMA_BLOCK = 0.01
"""Spread between the blocks of one process where it is not known: that of the noisier cases measured on an H200."""
PRIOR_PROCESSES = 4
"""The assumed spread between processes weighs as much as this many degrees of freedom of the measured one."""
ALLOWANCE = 0.003
"""Change of the log ratio that is no finding: two GPUs of one kind need not have the very same ratio."""
DISPLAYED = 0.99
"""Confidence of the intervals that are shown."""


Process = float | Sequence[float]
"""One process of a baseline: its median log ratio, or the log ratio of each of its blocks."""


@dataclass(frozen=True)
class Speedup:
    """The speedup as a log ratio: ``theta`` +- ``half_width`` (99 % interval of the measurement alone)."""

    theta: float
    half_width: float
    verdict: Verdict
    reason: str
    """``floor``, ``baseline``, or empty."""
    change: float | None = None
    """``theta`` less the baseline's, in log; ``None`` without a baseline."""
    change_half_width: float | None = None
    """Of its 99 % interval, which has the baseline's own noise in it."""

    @property
    def ratio(self) -> float:
        return math.exp(self.theta)

    @property
    def interval(self) -> tuple[float, float]:
        return math.exp(self.theta - self.half_width), math.exp(self.theta + self.half_width)


def log_ratios(reference: Sequence[float], fp8: Sequence[float]) -> list[float]:
    """One log ratio per ABBA block: the mean log of its two reference times less that of its two FP8 times.

    Both are milliseconds per step in the order taken, two entries a block. A drift that is linear in time over a block
    cancels, since the arms' mean times within it are equal. Raises ``ValueError`` where the entries do not pair.
    """
    if len(reference) != len(fp8) or len(reference) % 2:
        raise ValueError(f"blocks come in pairs: {len(reference)} reference and {len(fp8)} FP8 times")
    import numpy as np

    logs = np.log(np.asarray(reference, dtype=float)) - np.log(np.asarray(fp8, dtype=float))
    return [float(x) for x in (logs[0::2] + logs[1::2]) / 2]


def ratios_by_process(reference: Sequence[Sequence[float]], fp8: Sequence[Sequence[float]]) -> list[list[float]]:
    """:func:`log_ratios` of each fresh pair of processes."""
    return [log_ratios(mine, theirs) for mine, theirs in zip(reference, fp8, strict=True)]


def decide_speedup(
    processes: Sequence[Sequence[float]],
    *,
    baseline: Sequence[Process] = (),
    tolerance: float = 0.02,
    floor: float | None = 1.0,
    looks: int = len(LOOKS),
    cases: int = GATED_CASES,
) -> Speedup:
    """Compare the measured log ratios with a floor and with a baseline's.

    ``processes``: the log ratios of each fresh process; ``baseline``: those of each process of the baseline, or its
    median alone. ``tolerance``: the loss that must be caught, as a fraction.
    ``cases``: how many cases of the session are gated; ``ALPHA`` is shared among them and their looks (Bonferroni).

    Against the baseline: PASS when a loss of the tolerance is excluded; FAIL when it is not, and a loss beyond
    ``ALLOWANCE`` is proven, by every single process too; IMPROVED when a gain beyond it is proven in the same way.
    Against the floor: PASS above it, FAIL below it. Else INCONCLUSIVE, which asks for another look.
    """
    estimates = [median(x) for x in processes]
    theta = fmean(estimates)
    variance, stored_variance = process_variances(processes, baseline)
    own = math.sqrt(variance / len(processes))
    verdicts: list[tuple[str, Verdict]] = []
    change = change_error = None
    if floor is not None:
        verdicts.append(("floor", _against_floor(estimates, own, math.log(floor), looks, cases)))
    if baseline:
        stored = center(baseline)
        change = theta - stored
        change_error = math.sqrt(variance / len(processes) + stored_variance * center_variance(len(baseline)))
        changes = [x - stored for x in estimates]
        verdicts.append(("baseline", _against_baseline(changes, change_error, tolerance, looks, cases)))
    verdict, reason = _least_good(verdicts)
    shown = normal_quantile((1 + DISPLAYED) / 2)
    return Speedup(
        theta, shown * own, verdict, reason, change, shown * change_error if change_error is not None else None
    )


def _against_floor(estimates: Sequence[float], error: float, bound: float, looks: int, cases: int) -> Verdict:
    theta = fmean(estimates)
    if theta - normal_quantile(1 - ALPHA / looks) * error > bound:
        return Verdict.PASS
    q_fail = fail_quantile(looks, cases)
    confirmed = len(estimates) >= RUNS_TO_FAIL and max(estimates) < bound
    return Verdict.FAIL if confirmed and theta + q_fail * error < bound else Verdict.INCONCLUSIVE


def _against_baseline(changes: Sequence[float], error: float, tolerance: float, looks: int, cases: int) -> Verdict:
    """``changes``: each process's log ratio less the baseline's."""
    change, enough = fmean(changes), len(changes) >= RUNS_TO_FAIL
    q_fail, q_pass = fail_quantile(looks, cases), normal_quantile(1 - BETA / looks)
    if change - q_fail * error > ALLOWANCE:
        return Verdict.IMPROVED if enough and min(changes) > ALLOWANCE else Verdict.INCONCLUSIVE
    if change - q_pass * error > math.log(1 - tolerance):
        return Verdict.PASS
    if enough and change + q_fail * error < -ALLOWANCE and max(changes) < -ALLOWANCE:
        return Verdict.FAIL
    return Verdict.INCONCLUSIVE


def _least_good(verdicts: Sequence[tuple[str, Verdict]]) -> tuple[Verdict, str]:
    """The least good of several verdicts, and the name of the bound that gave it."""
    for wanted in (Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.IMPROVED):
        for reason, verdict in verdicts:
            if verdict is wanted:
                return verdict, reason
    return (Verdict.PASS if verdicts else Verdict.NOT_EXERCISED), ""


def center(baseline: Sequence[Process]) -> float:
    """The log ratio that a baseline stands for: the median of its processes' medians."""
    return median([median(x) for x in map(_blocks, baseline)])


def center_variance(processes: int) -> float:
    """Variance of :func:`center` for processes of unit variance; the median of one or two is their mean."""
    return max(1 / processes, median_variance(processes))


def process_variances(processes: Sequence[Sequence[float]], baseline: Sequence[Process] = ()) -> tuple[float, float]:
    """Variance of one process's median log ratio: of this run's, and of the baseline's. The gate's estimator.

    Each is ``SIGMA_RUN_FLOOR`` squared plus the noise between blocks. That noise is pooled over run and baseline; the
    run takes its own where that is larger. Both variances are scaled up where the medians spread more than this says,
    never down.
    """
    stored = [_blocks(x) for x in baseline]
    blocks = min(len(x) for x in processes)
    kept = [x for x in stored if len(x) > 1]
    stored_blocks = min((len(x) for x in kept), default=blocks)
    noise = _mean_square_sigma([*processes, *kept])
    mine = SIGMA_RUN_FLOOR**2 + max(noise, _mean_square_sigma(processes)) * median_variance(blocks)
    theirs = SIGMA_RUN_FLOOR**2 + noise * median_variance(stored_blocks)
    freedom = (len(processes) - 1, max(0, len(stored) - 1))
    if not sum(freedom):
        return mine, theirs
    expected = (freedom[0] * mine + freedom[1] * theirs) / sum(freedom)
    seen = pooled_variance([[median(x) for x in group] for group in (processes, stored)]) / expected
    scale = max(1.0, (PRIOR_PROCESSES + sum(freedom) * seen) / (PRIOR_PROCESSES + sum(freedom)))
    return mine * scale, theirs * scale


def _mean_square_sigma(processes: Sequence[Sequence[float]]) -> float:
    """Variance between blocks, by each process's median absolute deviation; a process counts by its blocks."""
    return sum(robust_sigma(x) ** 2 * len(x) for x in processes) / sum(len(x) for x in processes)


def _blocks(process: Process) -> Sequence[float]:
    return [process] if isinstance(process, (int, float)) else process


def smallest_tolerance(
    processes: int,
    between: float,
    within: float = SIGMA_BLOCK,
    blocks: int = BASELINE_BLOCKS,
) -> float:
    """The tolerance that a baseline of that many processes can hold, as a fraction.

    ``between``: standard deviation of its processes' log ratios, ``within``: of the ``blocks`` in each. A loss of the
    tolerance fails with probability ``POWER`` at the last look, among ``GATED_CASES`` cases:
    delta = ALLOWANCE + (q_fail + z(POWER)) * SE. The spread that so few processes show is weighed against the one that
    their blocks and ``SIGMA_RUN_FLOOR`` let one expect.
    """
    expected = SIGMA_RUN_FLOOR**2 + within**2 * median_variance(blocks)
    freedom = processes - 1
    stored = (PRIOR_PROCESSES * expected + freedom * between**2) / (PRIOR_PROCESSES + freedom)
    mine = stored / expected * (SIGMA_RUN_FLOOR**2 + within**2 * median_variance(LOOKS[-1][1]))
    error = math.sqrt(mine / LOOKS[-1][0] + stored * center_variance(processes))
    return 1 - math.exp(-ALLOWANCE - (fail_quantile(len(LOOKS), GATED_CASES) + normal_quantile(POWER)) * error)


def holds(baseline: Sequence[Sequence[float]]) -> float:
    """The tolerance that a baseline can hold, as a fraction; ``baseline``: log ratios per process and block."""
    between = sample_sd([median(x) for x in baseline])
    return smallest_tolerance(
        len(baseline), between, within=block_sigma(baseline), blocks=min(len(x) for x in baseline)
    )


def block_sigma(processes: Sequence[Sequence[float]]) -> float:
    """Standard deviation between the blocks of a process, by median absolute deviations, over all processes."""
    return math.sqrt(_mean_square_sigma(processes))


def fail_quantile(looks: int, cases: int) -> float:
    """Standard normal quantile of a FAIL: ``ALPHA`` shared by cases and looks. A look at too few processes to fail
    takes no share."""
    can_fail = max(1, looks - RUNS_TO_FAIL + 1)
    return normal_quantile(1 - ALPHA / (max(1, cases) * can_fail))


@dataclass(frozen=True)
class Speed:
    """A speedup as the mean log ratio over processes, with its standard error. The plain estimator's answer."""

    theta: float
    error: float
    processes: int

    @property
    def interval(self) -> tuple[float, float]:
        """Of the ratio, at the confidence ``DISPLAYED``."""
        half = normal_quantile((1 + DISPLAYED) / 2) * self.error
        return math.exp(self.theta - half), math.exp(self.theta + half)


def speed_of(values: Sequence[Sequence[float]], between: float | None = None) -> Speed:
    """The speedup in ``values``, log ratios per process and block: the plain estimator.

    ``between``: standard deviation between processes. By default that of these processes, and never below
    :data:`~pytest_fp8.rules.statistics.SIGMA_RUN_FLOOR`.
    """
    estimates = [median(blocks) for blocks in values]
    within = fmean(_uncorrected_sigma(blocks) for blocks in values)
    runs, blocks = len(values), min(len(x) for x in values)
    spread = max(SIGMA_RUN_FLOOR, sample_sd(estimates)) if between is None else between
    error = math.sqrt(math.pi / 2 * within**2 / (runs * blocks) + spread**2 / runs)
    return Speed(fmean(estimates), error, runs)


def _uncorrected_sigma(values: Sequence[float]) -> float:
    """1.4826 x the median absolute deviation, without the correction for few values: see the top of this file."""
    middle = median(values)
    return MAD_TO_SIGMA * median(abs(value - middle) for value in values)
