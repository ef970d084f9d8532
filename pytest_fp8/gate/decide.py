"""The decision rules: pure functions from numbers to a verdict. No torch, no files, no clocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pytest_fp8.gate.statistics import normal_quantile, robust_sigma, sample_sd, student_quantile
from pytest_fp8.gate.verdicts import Verdict

ALPHA = 0.01
"""Chance of calling a healthy case a regression, over all its looks."""
LOOKS: tuple[tuple[int, int], ...] = ((1, 6), (2, 6), (3, 12))
"""(fresh processes, ABBA blocks per process) of each look. Six blocks put the spread between blocks (0.15-0.5 %) well
under the spread between processes (0.3-0.4 %), so that further blocks of one process buy little and another process
buys more."""
SIGMA_RUN_FLOOR = 0.003
"""Spread of the log ratio between fresh processes: never taken smaller than was measured on an H200 (about 0.4 %)."""
LOSS_MARGIN = (0.02, 0.05)
"""Bounds in nats of the loss margin. Megatron-LM issue 1152 lost 0.094 nats, 3 %, and passed a 5 % gate."""
LOSS_CONFIDENCE = 0.95
MAX_LOSS_SEEDS = 8


@dataclass(frozen=True)
class Speedup:
    """The speedup as a log ratio: ``theta`` +- ``half_width`` (a ``1 - alpha/K`` bound on each side)."""

    theta: float
    half_width: float
    verdict: Verdict
    reason: str
    """``floor``, ``baseline``, or empty."""

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
    baseline: Sequence[float] = (),
    tolerance: float = 0.03,
    floor: float | None = 1.0,
    looks: int = len(LOOKS),
) -> Speedup:
    """Compare the measured log ratios with a floor and with a baseline's per-process log ratios.

    ``processes``: the log ratios of each fresh process. FAIL below the floor or below the baseline less the tolerance,
    PASS above both, each with confidence ``1 - ALPHA / looks``; else INCONCLUSIVE, which asks for another look.
    """
    estimates = [float(np.median(x)) for x in processes]
    theta = float(np.mean(estimates))
    runs, blocks = len(processes), min(len(x) for x in processes)
    within = float(np.mean([robust_sigma(x) for x in processes]))
    between = max(SIGMA_RUN_FLOOR, sample_sd(baseline))
    q = normal_quantile(1 - ALPHA / looks)
    # The median of n normal values has (pi / 2) times the variance of their mean.
    own = math.pi / 2 * within**2 / (runs * blocks) + between**2 / runs
    against = math.sqrt(own + (between**2 / len(baseline) if baseline else 0.0))
    alone = math.sqrt(own)

    bounds: list[tuple[str, float, float]] = []
    if floor is not None:
        bounds.append(("floor", math.log(floor), alone))
    if baseline:
        bounds.append(("baseline", float(np.median(baseline)) + math.log(1 - tolerance), against))
    half_width = q * (against if baseline else alone)
    if not bounds:
        return Speedup(theta, half_width, Verdict.NOT_EXERCISED, "")
    for reason, bound, error in bounds:
        if theta + q * error < bound:
            return Speedup(theta, half_width, Verdict.FAIL, reason)
    for reason, bound, error in bounds:
        if theta - q * error <= bound:
            return Speedup(theta, half_width, Verdict.INCONCLUSIVE, reason)
    return Speedup(theta, half_width, Verdict.PASS, "")


def smallest_tolerance(processes: int, between: float, runs: int = 1, looks: int = len(LOOKS)) -> float:
    """The tolerance that a baseline of that many processes can hold: smaller ones could not tell noise from change.

    From the design: delta >= (q + 2.33) * sigma_run * sqrt(1/R + 1/m), tolerance = 1 - exp(-delta).
    """
    q = normal_quantile(1 - ALPHA / looks)
    delta = (q + 2.33) * max(SIGMA_RUN_FLOOR, between) * math.sqrt(1 / runs + 1 / processes)
    return 1 - math.exp(-delta)


@dataclass(frozen=True)
class LossGap:
    """FP8 loss less BF16 loss at the end of the horizon, in nats: mean over seeds, bound, margin."""

    gap: float
    bound: float
    """Half-width of the one-sided 95 % interval over seeds; infinite for one seed."""
    margin: float
    verdict: Verdict


def tail_gap(fp8: Sequence[float], bf16: Sequence[float]) -> float:
    """Mean of FP8 - BF16 over the last fifth of the steps (at least one), in nats."""
    tail = max(1, len(fp8) // 5)
    return float(np.mean(np.asarray(fp8[-tail:]) - np.asarray(bf16[-tail:])))


def loss_margin(bf16_gaps: Sequence[float]) -> float:
    """Three standard deviations of BF16-against-BF16 tail gaps about zero, kept within :data:`LOSS_MARGIN`."""
    spread = math.sqrt(float(np.mean(np.square(bf16_gaps)))) if len(bf16_gaps) else 0.0
    return min(max(3 * spread, LOSS_MARGIN[0]), LOSS_MARGIN[1])


def decide_loss(gaps: Sequence[float], margin: float) -> LossGap:
    """PASS when the mean gap is below the margin with 95 % confidence, FAIL when above it with as much."""
    mean = float(np.mean(gaps))
    seeds = len(gaps)
    bound = math.inf
    if seeds > 1:
        bound = student_quantile(LOSS_CONFIDENCE, seeds - 1) * sample_sd(gaps) / math.sqrt(seeds)
    if mean + bound < margin:
        verdict = Verdict.PASS
    elif mean - bound > margin:
        verdict = Verdict.FAIL
    else:
        verdict = Verdict.INCONCLUSIVE
    return LossGap(mean, bound, margin, verdict)
