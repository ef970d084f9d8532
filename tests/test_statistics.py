"""The few statistics, against values from published tables."""

import math

import numpy as np
import pytest

from pytest_fp8.rules.statistics import normal_quantile, robust_sigma, sample_sd, student_cdf, student_quantile


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
