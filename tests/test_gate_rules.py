"""The rules that the gate's benchmark compares: today's stand where their sources put them, and its own looks again."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.gate.noise import Condition
from benchmarks.gate.rules import TODAY, mann_whitney_p, ours, process_seconds
from helpers.gate import histories_of, noise_put_in, verdicts
from pytest_fp8.stats.components import MEASURED
from pytest_fp8.verdicts import Verdict


@pytest.fixture(scope="module")
def noise():
    return noise_put_in()


def test_mann_whitney_against_published_values():
    # Mann & Whitney (1947), table I: P(U <= 1) = 2/20 and P(U <= 2) = 4/20 for two samples of three.
    x, y = np.array([[1.0, 2, 3], [1, 2, 5]]), np.array([[4.0, 5, 6], [3, 4, 6]])
    assert mann_whitney_p(x, y) == pytest.approx([2 / 20, 2 * 4 / 20])
    same = np.arange(12.0)[None]
    assert mann_whitney_p(same, same)[0] > 0.9
    assert mann_whitney_p(same, same + 100)[0] == pytest.approx(2 / math.comb(24, 12))


def test_mann_whitney_is_wrong_as_often_as_it_says():
    rng = np.random.default_rng(5)
    p = mann_whitney_p(rng.normal(size=(4000, 12)), rng.normal(size=(4000, 12)))
    assert np.mean(p < 0.05) == pytest.approx(0.05, abs=0.012)


@pytest.mark.parametrize(
    ("name", "passes", "fails"),
    [
        ("one-shot mean, 5 %", 1.049, 1.051),
        ("one-shot mean, 2 %", 1.019, 1.021),
        ("Megatron-LM, median +-5 %", 0.951, 0.949),
        ("Megatron-LM, median +-5 %", 1.049, 1.051),
        ("absolute, mean +5 ms", 1.049, 1.051),
        ("pytest-benchmark mean:5%", 1.049, 1.051),
        ("pytest-benchmark min:5%", 1.049, 1.051),
        ("asv, U test and 1.1x", 1.099, 1.101),
    ],
)
def test_todays_rules_stand_where_their_sources_put_them(name, passes, fails):
    rule = next(rule for rule in TODAY if rule.name == name)
    before = 100 + 0.001 * np.arange(24.0)[None]
    assert not rule.fails(before, passes * before[:, :12]).any()
    assert rule.fails(before, fails * before[:, 11:23]).all()


def test_pytest_benchmark_agrees_with_the_rule_that_stands_for_it():
    utils = pytest.importorskip("pytest_benchmark.utils")
    for factor in (1.04, 1.06):
        for field in ("mean", "min"):
            theirs = utils.parse_compare_fail(f"{field}:5%").fails({field: 100 * factor}, {field: 100.0})
            mine = next(r for r in TODAY if r.name == f"pytest-benchmark {field}:5%")
            assert bool(theirs) == mine.fails(np.array([[100.0] * 3]), np.array([[100 * factor] * 3]))[0]


def test_a_reference_outside_its_band_is_invalid_and_no_regression(noise):
    rng = np.random.default_rng(7)
    condition = Condition("common", common=(0.12, 0.15))
    traces, now = histories_of(rng, noise, 20, condition=condition, change=-0.08)
    found = verdicts(traces, now, ours(MEASURED, 0.02, 30))
    assert {one.verdict for one in found} == {Verdict.INVALID}


def test_the_rule_looks_again_and_fails_what_is_slower(noise):
    rng, decide = np.random.default_rng(9), ours(MEASURED, 0.02, 30)
    same, slower = (verdicts(*histories_of(rng, noise, 20, change=change), decide) for change in (0.0, -0.08))
    assert {one.verdict for one in slower} == {Verdict.FAIL}
    assert all(one.builds >= 2 for one in slower)
    assert sum(one.verdict is Verdict.PASS and one.builds == 1 for one in same) > 15


def test_gpu_seconds_count_every_step(noise):
    # 6 blocks of 2 x 3 steps and 9 warm-up steps per arm; 8 and 7 steps dropped at the arms' turns.
    expected = (45 + 8) * noise.bf16_ms + (45 + 7) * noise.fp8_ms
    assert process_seconds(noise, 6) == pytest.approx(expected / 1000)
