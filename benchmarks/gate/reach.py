"""What can be reached, by formula: the loss that fails 80 % of the time at the last look, by processes and by noise."""

from __future__ import annotations

import math

from pytest_fp8.rules.speed import ALLOWANCE, BASELINE_BLOCKS, LOOKS, center_variance, fail_quantile
from pytest_fp8.rules.statistics import median_variance, normal_quantile

CAUGHT = 0.80
BASELINE_PROCESSES = (2, 4, 6, 8)
RUN_PROCESSES = (2, 3, 4, 6)
NOISE = ((0.004, 0.003), (0.010, 0.003), (0.010, 0.004))
"""(between blocks, between processes): quiet and noisy cases of the H200, and processes that spread more."""


def caught(blocks: float, processes: float, stored: int, run: int, cases: int = 30) -> float:
    """The loss, as a fraction. ``blocks``, ``processes``: standard deviations of log ratios, taken as known."""
    one_run = processes**2 + blocks**2 * median_variance(LOOKS[-1][1])
    one_stored = processes**2 + blocks**2 * median_variance(BASELINE_BLOCKS)
    error = math.sqrt(one_run / run + one_stored * center_variance(stored))
    return 1 - math.exp(-ALLOWANCE - (fail_quantile(len(LOOKS), cases) + normal_quantile(CAUGHT)) * error)
