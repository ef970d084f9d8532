"""The decision rules: pure functions from numbers to a verdict. No torch, no files, no clocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np

from pytest_fp8.rules.statistics import (
    SIGMA_RUN_FLOOR,
    median_variance,
    normal_quantile,
    pooled_variance,
    robust_sigma,
    sample_sd,
    student_quantile,
)
from pytest_fp8.verdicts import Verdict

ALPHA = 0.01
"""Chance that a session calls any healthy case a regression: over all its gated cases and all their looks."""
GATED_CASES = 30
"""Cases that share ``ALPHA`` where a caller does not say how many there are."""
BETA = 0.05
"""Chance that a loss of exactly the tolerance passes, over all looks."""
POWER = 0.50
"""Chance, at the last look, that a loss of the tolerance fails: the least that a baseline must offer to be stored. One
that offers just that fails a loss half as large again 98 % of the time; refused, it would fail nothing at all."""
LOOKS: tuple[tuple[int, int], ...] = ((1, 6), (2, 6), (3, 6), (4, 6))
"""(fresh processes, ABBA blocks per process) of each look. Further blocks of one process buy little: they do not touch
the spread between processes. The first look can pass a case, and never fail one."""
RUNS_TO_FAIL = 2
"""A finding needs this many processes, each of which shows it: one process may have been unlucky as a whole."""
BASELINE_BLOCKS = 8
"""ABBA blocks of each process of a baseline: it is measured once and held against often, so it may cost more."""
SIGMA_BLOCK = 0.01
"""Spread between the blocks of one process, where nobody says: the noisier of the cases measured on an H200."""
PRIOR_PROCESSES = 4
"""What is assumed of a spread counts as much as this many degrees of freedom of what was seen."""
ALLOWANCE = 0.003
"""Change of the log ratio that is nobody's fault: two GPUs of one kind need not have the very same ratio."""
DISPLAYED = 0.99
"""Confidence of the interval that is shown."""
LOSS_MARGIN = (0.02, 0.05)
"""Bounds of the loss margin: in nats, or as shares of a reference's loss that ends below 1 (:mod:`.losses`).
Megatron-LM issue 1152 lost 0.094 nats, 3 %, and passed a 5 % gate."""
LOSS_CONFIDENCE = 0.95
"""Of a PASS: the mean gap is below the margin."""
LOSS_ALPHA = 0.01
"""Chance of calling a case's loss too high although its true gap is the margin itself, over all numbers of seeds."""
MAX_LOSS_SEEDS = 8


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
    cancels, since the arms' mean times within it are equal.
    """
    if len(reference) != len(fp8) or len(reference) % 2:
        raise ValueError(f"blocks come in pairs: {len(reference)} reference and {len(fp8)} FP8 times")
    logs = np.log(np.asarray(reference, dtype=float)) - np.log(np.asarray(fp8, dtype=float))
    return [float(x) for x in (logs[0::2] + logs[1::2]) / 2]


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
    """What several bounds say together, and which of them says it."""
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
    """Variance of one process's median log ratio: of this run's, and of the baseline's.

    Each is ``SIGMA_RUN_FLOOR`` squared and what the noise between blocks adds: that of run and baseline together, and
    for the run its own where it is the noisier. Both are scaled up where the medians spread more than that, never down.
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
    runs: int = LOOKS[-1][0],
    looks: int = len(LOOKS),
    cases: int = GATED_CASES,
    within: float = SIGMA_BLOCK,
    blocks: int = BASELINE_BLOCKS,
) -> float:
    """The tolerance that a baseline of that many processes can hold, as a fraction.

    ``between``: standard deviation of its processes' log ratios, ``within``: of the ``blocks`` in each. A loss of the
    tolerance fails with probability ``POWER`` at the last look, of ``runs`` processes:
    delta = ALLOWANCE + (q_fail + z(POWER)) * SE. What so few processes show between them is weighed against what their
    blocks and ``SIGMA_RUN_FLOOR`` let one expect.
    """
    expected = SIGMA_RUN_FLOOR**2 + within**2 * median_variance(blocks)
    freedom = processes - 1
    stored = (PRIOR_PROCESSES * expected + freedom * between**2) / (PRIOR_PROCESSES + freedom)
    mine = stored / expected * (SIGMA_RUN_FLOOR**2 + within**2 * median_variance(LOOKS[-1][1]))
    error = math.sqrt(mine / runs + stored * center_variance(processes))
    return 1 - math.exp(-ALLOWANCE - (fail_quantile(looks, cases) + normal_quantile(POWER)) * error)


def holds(baseline: Sequence[Sequence[float]]) -> float:
    """The tolerance that a baseline can hold, from the log ratios of each of its processes, block by block."""
    between = sample_sd([median(x) for x in baseline])
    return smallest_tolerance(
        len(baseline), between, within=block_sigma(baseline), blocks=min(len(x) for x in baseline)
    )


def block_sigma(processes: Sequence[Sequence[float]]) -> float:
    """Standard deviation between the blocks of a process, by median absolute deviations, over all processes."""
    return math.sqrt(_mean_square_sigma(processes))


def fail_quantile(looks: int, cases: int) -> float:
    """Standard normal quantile of a FAIL: ``ALPHA`` over cases and looks. A look at too few processes costs none."""
    can_fail = max(1, looks - RUNS_TO_FAIL + 1)
    return normal_quantile(1 - ALPHA / (max(1, cases) * can_fail))


@dataclass(frozen=True)
class LossGap:
    """FP8 loss less BF16 loss at the end of the horizon, in the loss's own unit: mean over seeds, bound, margin."""

    gap: float
    bound: float
    """Half-width of the one-sided 95 % interval over seeds; infinite for one seed."""
    margin: float
    verdict: Verdict


def tail_gap(fp8: Sequence[float], bf16: Sequence[float]) -> float:
    """Mean of FP8 - BF16 over the last fifth of the steps (at least one), in the loss's own unit."""
    return float(np.mean(np.asarray(tail(fp8)) - np.asarray(tail(bf16))))


def tail(losses: Sequence[float]) -> Sequence[float]:
    """The last fifth of a curve, at least one step: the end that is judged."""
    return losses[-max(1, len(losses) // 5) :]


def loss_noise(bf16_gaps: Sequence[float]) -> float:
    """Three standard deviations of BF16-against-BF16 tail gaps about zero; 0 where there are none."""
    return 3 * math.sqrt(float(np.mean(np.square(bf16_gaps)))) if len(bf16_gaps) else 0.0


def loss_margin(bf16_gaps: Sequence[float], scale: float = 1.0) -> float:
    """:func:`loss_noise`, kept within :data:`LOSS_MARGIN` times ``scale``."""
    return min(max(loss_noise(bf16_gaps), LOSS_MARGIN[0] * scale), LOSS_MARGIN[1] * scale)


def decide_loss(gaps: Sequence[float], margin: float, noise: float = 0.0) -> LossGap:
    """PASS when the mean gap is below the margin with ``LOSS_CONFIDENCE``; FAIL when above it, and above ``noise``,
    with the confidence that ``LOSS_ALPHA`` leaves each number of seeds at which the question may be asked again; else
    INCONCLUSIVE. No gap at all passes any margin, one of 0 too.

    Few seeds can be close to each other by chance, and Student's t is then the only guard: a FAIL needs more of it.
    """
    mean = float(np.mean(gaps))
    seeds = len(gaps)
    bound = proven = math.inf
    if seeds > 1:
        error = sample_sd(gaps) / math.sqrt(seeds)
        bound = student_quantile(LOSS_CONFIDENCE, seeds - 1) * error
        proven = student_quantile(1 - LOSS_ALPHA / (MAX_LOSS_SEEDS - 2), seeds - 1) * error
    if mean + bound < margin or (seeds > 1 and not any(gaps)):
        verdict = Verdict.PASS
    elif mean - proven > max(margin, noise):
        verdict = Verdict.FAIL
    else:
        verdict = Verdict.INCONCLUSIVE
    return LossGap(mean, bound, margin, verdict)
