"""The few statistics, against values from published tables."""

import math

import numpy as np
import pytest

from pytest_fp8.stats.quantiles import (
    chi_square_quantile,
    normal_quantile,
    robust_sigma,
    robust_variance,
    sample_sd,
    student_cdf,
    student_quantile,
)


# Student's t, upper 95 % and 99 % points (Abramowitz & Stegun, table 26.10).
@pytest.mark.parametrize(
    ("p", "df", "value"),
    [(0.95, 1, 6.314), (0.95, 2, 2.920), (0.95, 3, 2.353), (0.95, 7, 1.895), (0.99, 2, 6.965), (0.99, 30, 2.457)],
)
def test_student_quantiles_are_those_of_the_table(p, df, value):
    assert student_quantile(p, df) == pytest.approx(value, abs=6e-4)


def test_student_becomes_normal_with_many_degrees_of_freedom():
    assert student_quantile(0.95, 5000) == pytest.approx(normal_quantile(0.95), abs=1e-3)


@pytest.mark.parametrize("df", range(1, 12))
def test_student_cdf_is_symmetric_and_rises(df):
    points = [student_cdf(t, df) for t in np.linspace(-5, 5, 21)]
    assert points == sorted(points)
    assert student_cdf(0, df) == pytest.approx(0.5)
    assert student_cdf(1.3, df) + student_cdf(-1.3, df) == pytest.approx(1)


@pytest.mark.parametrize("call", [lambda: student_cdf(1, 0), lambda: student_quantile(1.0, 3)])
def test_what_has_no_answer_is_an_error(call):
    with pytest.raises(ValueError, match=r"degrees|probability"):
        call()


def test_robust_sigma_estimates_the_standard_deviation_and_ignores_an_outlier():
    values = np.random.default_rng(0).normal(0, 2.0, 20_000)
    assert robust_sigma(values) == pytest.approx(2.0, rel=0.03)
    assert robust_sigma([*values[:99], 1e9]) < 3
    assert robust_sigma([1.0]) == 0.0
    assert math.isclose(sample_sd([1.0, 3.0]), math.sqrt(2))
    assert sample_sd([1.0]) == 0.0
    assert math.isnan(sample_sd([1.0, math.nan]))


# Chi-square, lower and upper 2.5 % points (Abramowitz & Stegun, table 26.8).
@pytest.mark.parametrize(
    ("df", "low", "high"),
    [
        (1, 0.000982, 5.02389),
        (2, 0.0506356, 7.37776),
        (3, 0.215795, 9.34840),
        (10, 3.24697, 20.4831),
        (100, 74.2219, 129.561),
    ],
)
def test_chi_square_quantiles_are_those_of_the_table(df, low, high):
    assert chi_square_quantile(0.025, df) == pytest.approx(low, rel=1e-3)
    assert chi_square_quantile(0.975, df) == pytest.approx(high, rel=1e-5)


@pytest.mark.parametrize("count", [2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 16, 64])
def test_a_robust_variance_is_that_of_normal_values(count):
    samples = np.random.default_rng(0).normal(0, 2.0, (20_000, count))
    assert np.mean([robust_variance(values) for values in samples]) == pytest.approx(4.0, rel=0.04)
    assert robust_variance([1.0]) == 0.0
