"""Change points of a history: how often one is seen where there is none, and where there is one."""

from __future__ import annotations

import numpy as np
import pytest

from pytest_fp8.baselines.noise import change_points
from pytest_fp8.rules.variance import MEASURED

BETWEEN, WITHIN = 0.002, 0.006


def history(rng, levels):
    sessions = [level + rng.normal(0, MEASURED.session) for level in levels]
    return [[list(level + rng.normal(0, BETWEEN) + rng.normal(0, WITHIN, 8)) for _ in range(4)] for level in sessions]


@pytest.mark.parametrize("count", [2, 4, 8])
def test_a_history_without_a_change_has_no_change_point(count):
    rng = np.random.default_rng(5)
    seen = [bool(change_points(history(rng, [0.1] * count))) for _ in range(600)]
    assert np.mean(seen) < 0.02


def test_a_change_is_found_where_it_is():
    rng = np.random.default_rng(5)
    found = [change_points(history(rng, [0.1] * 4 + [0.08] * 4)) for _ in range(200)]
    assert np.mean([len(points) == 1 for points in found]) > 0.97
    assert np.mean([abs(points[0][0] - 4) <= 1 for points in found if points]) > 0.97
    assert np.mean([points[0][1] for points in found if points]) == pytest.approx(-0.02, abs=0.002)


@pytest.mark.parametrize("last", [0.1, 0.04], ids=["the first is larger", "the last is larger"])
def test_two_changes_are_two(last):
    rng = np.random.default_rng(5)
    [(first, up), (second, down)] = change_points(history(rng, [0.1] * 3 + [0.14] * 3 + [last] * 2))
    assert (first, second) == (3, 6)
    assert up > 0.03 > -0.03 > down


def test_one_session_or_none_has_none():
    assert change_points([]) == []
    assert change_points([[[0.1, 0.1]]]) == []
