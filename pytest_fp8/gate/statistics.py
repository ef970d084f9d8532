"""The few statistics that the decisions need, from numpy and the standard library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

MAD_TO_SIGMA = 1.4826
"""Median absolute deviation to standard deviation, for normal data: 1 / NormalDist().inv_cdf(0.75)."""


def normal_quantile(p: float) -> float:
    return NormalDist().inv_cdf(p)


def robust_sigma(values: Sequence[float]) -> float:
    """1.4826 x the median absolute deviation from the median; 0 for fewer than two values."""
    if len(values) < 2:
        return 0.0
    array = np.asarray(values, dtype=float)
    return float(MAD_TO_SIGMA * np.median(np.abs(array - np.median(array))))


def sample_sd(values: Sequence[float]) -> float:
    """Standard deviation with n - 1; 0 for fewer than two values."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def student_cdf(t: float, df: int) -> float:
    """P(T <= t) of Student's t with a whole number of degrees of freedom, by the finite sums of
    Abramowitz & Stegun 26.7.3 (odd) and 26.7.4 (even)."""
    if df < 1:
        raise ValueError(f"degrees of freedom must be 1 or more, not {df}")
    theta = math.atan(t / math.sqrt(df))
    sine, cosine = math.sin(theta), math.cos(theta)
    if df % 2:
        term, total = cosine, cosine if df > 1 else 0.0
        for k in range(3, df - 1, 2):
            term *= cosine * cosine * (k - 1) / k
            total += term
        inside = 2 / math.pi * (theta + sine * total)
    else:
        term = total = 1.0
        for k in range(2, df - 1, 2):
            term *= cosine * cosine * (k - 1) / k
            total += term
        inside = sine * total
    return 0.5 * (1 + inside)


def student_quantile(p: float, df: int) -> float:
    """The value that Student's t stays below with probability ``p``; by bisection of :func:`student_cdf`."""
    if not 0 < p < 1:
        raise ValueError(f"a probability lies between 0 and 1, not {p}")
    low, high = -1e6, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        if student_cdf(middle, df) < p:
            low = middle
        else:
            high = middle
    return (low + high) / 2
