"""The few statistics that the decisions need, and the constants that they share.

Loads no numpy: the command line, which must answer at once, needs some of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from statistics import NormalDist, fmean, median

MAD_TO_SIGMA = 1.4826
"""Median absolute deviation to standard deviation, for normal data: 1 / NormalDist().inv_cdf(0.75)."""
_FEW_VALUES = {2: 1.196, 3: 1.495, 4: 1.363, 5: 1.206, 6: 1.200, 7: 1.140, 8: 1.129, 9: 1.107}
"""Small-sample corrections of the median absolute deviation, by the number of values."""
_FEW_SQUARES = {2: 0.910, 3: 1.314, 4: 1.395, 5: 1.103, 6: 1.155, 7: 1.054, 8: 1.087, 9: 1.036}
"""The same of its square, from 8 million normal samples each. The square of a corrected deviation is too large: 1.70
times the variance of three values, 1.25 of six."""


@lru_cache
def normal_quantile(p: float) -> float:
    return NormalDist().inv_cdf(p)


def robust_sigma(values: Sequence[float]) -> float:
    """1.4826 x the median absolute deviation from the median; 0 for fewer than two values.

    Corrected for few values as Croux & Rousseeuw (1992) give it: uncorrected, six values say 0.83 of what is there.
    """
    count = len(values)
    return _FEW_VALUES.get(count, count / (count - 0.8)) * _deviation(values) if count > 1 else 0.0


def robust_variance(values: Sequence[float]) -> float:
    """The variance of normal values by the median absolute deviation, without bias; 0 for fewer than two values."""
    count = len(values)
    if count < 2:
        return 0.0
    return _FEW_SQUARES.get(count, count / (count - (0.28 if count % 2 else 0.45))) * _deviation(values) ** 2


def _deviation(values: Sequence[float]) -> float:
    middle = median(values)
    return MAD_TO_SIGMA * median([abs(x - middle) for x in values])


def median_variance(count: int) -> float:
    """Variance of the median of ``count`` normal values of unit variance.

    (pi / 2) / n for many; few of them do better, an even number most. Within 1 % of the exact values from 4 on.
    """
    return math.pi / 2 / (count + (0.5 if count % 2 else 1.3))


def pooled_variance(groups: Sequence[Sequence[float]]) -> float:
    """Variance about each group's own mean, with as many degrees of freedom as the groups leave; 0 without any."""
    freedom = sum(max(0, len(group) - 1) for group in groups)
    if not freedom:
        return 0.0
    return sum((x - fmean(group)) ** 2 for group in groups if group for x in group) / freedom


def sample_sd(values: Sequence[float]) -> float:
    """Standard deviation with n - 1; 0 for fewer than two values."""
    return math.sqrt(pooled_variance([values]))


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


def chi_square_cdf(x: float, df: int) -> float:
    """P(X <= x) of chi-square with a whole number of degrees of freedom (Abramowitz & Stegun 26.4.4 and 26.4.5)."""
    if x <= 0:
        return 0.0
    half = x / 2
    terms = (math.exp(k / 2 * math.log(half) - half - math.lgamma(k / 2 + 1)) for k in range(df % 2, df, 2))
    return (math.erf(math.sqrt(half)) if df % 2 else 1.0) - sum(terms)


@lru_cache(maxsize=4096)
def chi_square_quantile(p: float, df: int) -> float:
    """The value that chi-square stays below with probability ``p``."""
    return _bisected(lambda x: chi_square_cdf(x, df), p, 0.0, 2 * df + 50.0)


@lru_cache(maxsize=4096)
def student_quantile(p: float, df: int) -> float:
    """The value that Student's t stays below with probability ``p``."""
    if not 0 < p < 1:
        raise ValueError(f"a probability lies between 0 and 1, not {p}")
    return _bisected(lambda t: student_cdf(t, df), p, -1e6, 1e6)


def _bisected(cdf: Callable[[float], float], p: float, low: float, high: float) -> float:
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if cdf(middle) < p else (low, middle)
    return (low + high) / 2
