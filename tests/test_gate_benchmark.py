"""The gate's own benchmark: its noise is what it was fitted to, today's rules are what their sources say, the promises
hold on small numbers of trials."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.gate import rules, simulate
from benchmarks.gate.__main__ import main
from benchmarks.gate.noise import (
    CONDITIONS,
    QUIET,
    Condition,
    assumed_launch_bound,
    autocorrelation,
    draw,
    fit,
)
from benchmarks.gate.reach import caught
from benchmarks.gate.recordings import from_recording, load
from benchmarks.gate.rules import TODAY, mann_whitney_p, ours, process_seconds, today

BLOCKS = 24


def recording(block=0.004, run=0.003, processes=4, seed=0, **changes):
    """A recording as ``record.py`` writes one; its noise is what the arguments say."""
    rng = np.random.default_rng(seed)
    entries = []
    for _ in range(processes):
        shift = rng.normal(0, run)
        bf16, fp8 = (
            [float(x) for x in base * np.exp(sign * shift / 2 + rng.normal(0, block, 2 * BLOCKS))]
            for base, sign in ((120.0, 1), (107.0, -1))
        )
        entries.append({"bf16": bf16, "fp8": fp8, "throttles": [], "strangers": 0, "build_seconds": 20.0})
    return {"case": "1b-x", "steps_per_block": 3, "dropped_steps": 1, "processes": entries, **changes}


@pytest.fixture(scope="module")
def noise():
    return fit({"1b-x": [from_recording(recording(processes=12), "x")]})["1b-x"]


@pytest.fixture(scope="module")
def stored():
    return fit(load())


# -- recordings and noise --------------------------------------------------------------------------------------------


def test_the_fit_finds_the_noise_that_was_put_in(noise):
    # Four blocks of 0.4 % make one log ratio: half the square root of their squares' sum.
    assert noise.sigma_block == pytest.approx(0.004, rel=0.1)
    assert noise.sigma_run == pytest.approx(0.003, rel=0.5)
    assert abs(autocorrelation(noise)) < 0.15
    assert (noise.bf16_ms, noise.fp8_ms) == (pytest.approx(120, rel=0.01), pytest.approx(107, rel=0.01))


def test_an_abba_block_is_cut_out_in_the_order_taken():
    data = recording(processes=1)
    data["processes"][0] |= {"bf16": [100.0, 103.0] * 2, "fp8": [81.0, 82.0] * 2}
    [quads] = from_recording(data, "x").quads
    assert np.exp(quads[0]) == pytest.approx([100, 81, 82, 103])


def test_a_disturbed_process_is_left_out_and_nothing_else_is_an_error():
    data = recording(processes=2)
    data["processes"][0]["throttles"] = ["thermal"]
    assert len(from_recording(data, "x").quads) == 1
    data["processes"][1]["strangers"] = 1
    with pytest.raises(ValueError, match="no undisturbed process"):
        from_recording(data, "x")


def test_a_trace_has_the_spread_of_its_noise(noise):
    rng = np.random.default_rng(1)
    x = draw(rng, noise, (400, 4, 12)).log_ratios
    assert x.shape == (400, 4, 12)
    assert np.median(x) == pytest.approx(math.log(noise.bf16_ms / noise.fp8_ms), abs=5e-4)
    assert x.std(axis=2).mean() == pytest.approx(noise.sigma_block, rel=0.15)
    between = np.median(x, axis=2).std(axis=1, ddof=1)
    assert math.sqrt((between**2).mean()) == pytest.approx(math.hypot(noise.sigma_run, 1.2 * 0.004 / 12**0.5), rel=0.15)


def test_neighbouring_blocks_stay_neighbours():
    data = recording(processes=4)
    for entry in data["processes"]:
        wave = np.exp(0.02 * np.sin(np.arange(BLOCKS) / 3)).repeat(2)
        entry["bf16"] = [float(x) for x in wave * np.asarray(entry["bf16"])]
    waved = fit({"1b-x": [from_recording(data, "x")]})["1b-x"]
    assert autocorrelation(waved) > 0.7
    x = draw(np.random.default_rng(2), waved, (300, 1, 12)).log_ratios[:, 0]
    x = x - x.mean(axis=1, keepdims=True)
    assert (x[:, 1:] * x[:, :-1]).sum() / (x**2).sum() > 0.4


def test_a_change_is_a_change_of_the_ratio_by_the_fp8_arm_alone(noise):
    base, slower = (draw(np.random.default_rng(3), noise, (50, 1, 6), change=c) for c in (0.0, -0.05))
    assert slower.bf16 == pytest.approx(base.bf16)
    assert slower.fp8 == pytest.approx(base.fp8 / 0.95)


@pytest.mark.parametrize("condition", [CONDITIONS[1], CONDITIONS[3]], ids=lambda c: c.name)
def test_what_is_common_to_both_arms_leaves_the_ratio(noise, condition):
    calm, moved = (draw(np.random.default_rng(4), noise, (200, 2, 6), c) for c in (QUIET, condition))
    assert np.median(moved.log_ratios) == pytest.approx(np.median(calm.log_ratios), abs=1e-3)
    assert np.median(moved.fp8) > 1.004 * np.median(calm.fp8)


def test_what_the_repository_has_can_be_fitted(stored):
    assert any(noise.gpu_bound for noise in stored.values())
    for noise in stored.values():
        assert 0 < noise.sigma_block < 0.1
        assert noise.sigma_run >= 0.003


# -- rules -----------------------------------------------------------------------------------------------------------


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


def test_our_rule_in_the_benchmark_is_the_plugins(noise, monkeypatch):
    asked = []
    real = rules.decide_speedup
    monkeypatch.setattr(rules, "decide_speedup", lambda *a, **k: asked.append(k) or real(*a, **k))
    rng = np.random.default_rng(6)
    before, now = draw(rng, noise, (5, 4, 12), is_baseline=True), draw(rng, noise, (5, 4, 6))
    ours(before, now, noise, 0.02, 30)
    assert len(asked) >= 5
    assert all(k["cases"] == 30 and k["tolerance"] == 0.02 for k in asked)
    assert all(len(k["baseline"]) == 4 and len(k["baseline"][0]) == 12 for k in asked)


def test_a_reference_outside_its_band_is_invalid_and_no_regression(noise):
    rng = np.random.default_rng(7)
    before = draw(rng, noise, (40, 4, 12), is_baseline=True)
    now = draw(rng, noise, (40, 4, 6), Condition("common", common=(0.12, 0.15)), change=-0.08)
    outcome = ours(before, now, noise, 0.02, 30)
    assert not outcome.failed.any()
    assert outcome.other["INVALID"] + outcome.other.get("refused", 0) == 40


def test_a_launch_bound_case_is_refused_a_baseline():
    noise = assumed_launch_bound()
    assert not noise.gpu_bound
    rng = np.random.default_rng(8)
    before, now = draw(rng, noise, (300, 4, 12), is_baseline=True), draw(rng, noise, (300, 4, 6))
    assert ours(before, now, noise, 0.02, 30).other["refused"] > 295


def test_gpu_seconds_count_every_step(noise):
    # 6 blocks of 2 x 3 steps and 9 warm-up steps per arm; 8 and 7 steps dropped at the arms' turns.
    expected = (45 + 8) * noise.bf16_ms + (45 + 7) * noise.fp8_ms
    assert process_seconds(noise, 6) == pytest.approx(expected / 1000)
    rng = np.random.default_rng(9)
    before, now = draw(rng, noise, (20, 4, 12), is_baseline=True), draw(rng, noise, (20, 4, 6), change=-0.08)
    outcome = ours(before, now, noise, 0.02, 30)
    assert (outcome.builds[outcome.failed] >= 2).all()
    assert outcome.gpu_seconds == pytest.approx(outcome.builds * process_seconds(noise, 6))
    assert today(TODAY[0], before, now, noise).gpu_seconds[0] == pytest.approx(12 * 3 * noise.fp8_ms / 1000)


# -- the promises, on few trials -------------------------------------------------------------------------------------


@pytest.mark.parametrize("condition", CONDITIONS, ids=lambda c: c.name)
def test_no_false_alarm_in_fifteen_hundred_healthy_cases(noise, condition):
    [mine, *_] = simulate.simulate(noise, condition, 0.0, simulate.Plan(), 1500)
    assert mine.failed == 0
    assert mine.gated > 1000


def test_regressions_are_caught_and_todays_rules_miss_them(noise):
    tallies = {t.rule: t for t in simulate.simulate(noise, QUIET, -0.03, simulate.Plan(), 400)}
    assert tallies[simulate.OURS].rate > 0.95
    assert tallies["Megatron-LM, median +-5 %"].rate < 0.1
    assert simulate.simulate(noise, QUIET, -0.02, simulate.Plan(), 400)[0].rate > 0.8


def test_a_run_is_reproducible_and_two_jobs_differ(noise):
    one, same = (simulate.simulate(noise, QUIET, -0.01, simulate.Plan(), 200) for _ in range(2))
    assert one == same
    other = simulate.simulate(noise, QUIET, -0.01, simulate.Plan(seed=4), 200)
    assert [t.failed for t in one] != [t.failed for t in other]


def test_what_the_formula_promises_the_simulation_finds(noise, monkeypatch):
    # Nothing is refused: the question is the power at a tolerance that this noise only just holds.
    monkeypatch.setattr(rules, "holds", lambda *_: 0.0)
    loss = caught(noise.sigma_block, noise.sigma_run, stored=4, run=4)
    plan = simulate.Plan(tolerance=loss)
    assert simulate.simulate(noise, QUIET, -loss, plan, 600)[0].rate == pytest.approx(0.8, abs=0.12)
    assert caught(0.01, 0.003, 2, 2) > caught(0.01, 0.003, 4, 4) > caught(0.004, 0.003, 4, 4)


def test_intervals_and_sessions():
    # Wilson's interval of 0 in 100 and of 50 in 100, as published tables have them.
    assert simulate.wilson(0, 100) == (0.0, pytest.approx(0.0370, abs=2e-4))
    assert simulate.wilson(50, 100) == (pytest.approx(0.4038, abs=2e-4), pytest.approx(0.5962, abs=2e-4))
    assert simulate.wilson(0, 0) == (0.0, 1.0)
    assert simulate.per_session(0.01 / 30) == pytest.approx(0.00995, abs=1e-4)


def test_the_command_prints_its_tables_and_writes_json(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(simulate.Plan, "healthy", 200)
    monkeypatch.setattr(simulate.Plan, "changed", 200)
    monkeypatch.setattr("benchmarks.gate.__main__.load", lambda: {"1b-x": [from_recording(recording(), "x")]})
    monkeypatch.setattr("benchmarks.gate.__main__.run", lambda noises, plan: simulate.run(noises, plan, workers=1))
    assert main(["--quick", "--json", str(tmp_path / "out.json")]) == 0
    text = capsys.readouterr().out
    for words in ("False alarms per session of 30", "common", "Megatron-LM", "launch-bound (assumed)", "1b-x"):
        assert words in text
    out = json.loads((tmp_path / "out.json").read_text())
    assert {t["rule"] for t in out["tallies"]} == {simulate.OURS, *(r.name for r in TODAY)}
    assert all(t["interval"][0] <= t["rate"] <= t["interval"][1] for t in out["tallies"] if t["gated"])


def test_noise_scales_with_its_case(noise):
    louder = replace(assumed_launch_bound(), sigma_block=0.01, sigma_run=0.0)
    x = draw(np.random.default_rng(10), louder, (300, 1, 24)).log_ratios
    assert x.std(axis=2).mean() == pytest.approx(0.01, rel=0.2)


def test_two_modes_within_an_arm_do_not_pass_for_a_spread_between_processes():
    data = recording(block=0.003, run=0.0, processes=50, seed=3)
    # Turns of two blocks: the first of BF16's is faster than its second, and so is the first of FP8's.
    modes = {"bf16": np.exp([0.0, 0.03]), "fp8": np.exp([-0.02, 0.02])}
    for entry in data["processes"]:
        for arm, factors in modes.items():
            entry[arm] = [float(x) for x in np.asarray(entry[arm]) * np.tile(factors, BLOCKS)]
    quads = fit({"1b-x": [from_recording(data, "x")]})["1b-x"].residuals
    assert quads.shape == (50, BLOCKS, 4)
    ratios = (quads[..., 0] + quads[..., 3] - quads[..., 1] - quads[..., 2]) / 2
    assert np.median(ratios, axis=1) == pytest.approx(0, abs=1e-12)
