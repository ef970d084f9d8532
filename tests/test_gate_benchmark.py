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

from benchmarks.gate import simulate
from benchmarks.gate.__main__ import main
from benchmarks.gate.noise import (
    CONDITIONS,
    QUIET,
    Condition,
    autocorrelation,
    draw,
    fit,
)
from benchmarks.gate.recordings import BASELINES, from_recording, histories, load
from benchmarks.gate.replay import replay
from benchmarks.gate.rules import TODAY, gated, mann_whitney_p, ours, process_seconds
from pytest_fp8.rules.variance import MEASURED, estimate
from pytest_fp8.verdicts import Verdict

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
        entries.append({"bf16": bf16, "fp8": fp8, "throttles": [], "strangers": 0})
    return {"case": "1b-x", "steps_per_block": 3, "dropped_steps": 1, "processes": entries, **changes}


@pytest.fixture(scope="module")
def noise():
    return fit({"1b-x": [from_recording(recording(processes=12), "x")]}, MEASURED)["1b-x"]


@pytest.fixture(scope="module")
def stored():
    return fit(load(), MEASURED)


# -- recordings and noise --------------------------------------------------------------------------------------------


def test_the_fit_finds_the_noise_that_was_put_in(noise):
    # Four blocks of 0.4 % make one log ratio: half the square root of their squares' sum.
    assert noise.sigma_block == pytest.approx(0.004, rel=0.1)
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
    waved = fit({"1b-x": [from_recording(data, "x")]}, MEASURED)["1b-x"]
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


def test_repeated_sessions_come_in_the_order_taken_and_by_one_way_of_measuring():
    found = histories()
    assert len(found["8b-te-delayed"]) == 4
    assert [session[:4] for session in found["1b-torchao-tensorwise"]][:2] == ["b1fe", "bb13"]
    assert not any(session.startswith(("d96f7cf", "df30e8e")) for case in found.values() for session in case)


def test_what_is_gated_on_busy_time_is_not_mixed_with_step_times(tmp_path):
    """Recordings and earlier sessions of such a case are of step time."""
    assert "1b-te-current" not in load()
    busy = histories()["1b-te-current"]
    assert {len(process) for session in busy.values() for process in session} == {26}, "single steps, no blocks"
    here = tmp_path / "h200"
    here.mkdir()
    for name in ("1b-te-current", "1b-te-block"):
        (here / f"{name}.json").write_bytes((BASELINES[0] / f"{name}.json").read_bytes())
    for folders in ((here, BASELINES[0]), (BASELINES[0], here)):
        assert histories(baselines=folders)["1b-te-current"] == busy


def test_a_session_moves_the_ratio_and_nothing_else(noise):
    still, moved = (
        draw(np.random.default_rng(3), noise, (50, 1, 6), session=np.full(50, shift)) for shift in (0.0, 0.01)
    )
    assert moved.log_ratios - still.log_ratios == pytest.approx(0.01)
    assert np.median(moved.bf16) == pytest.approx(np.median(still.bf16) * math.exp(0.005), rel=1e-3)


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


def histories_of(rng, noise, count, sessions=4, **how):
    traces = [draw(rng, noise, (count, 4, 8), is_baseline=True) for _ in range(sessions)]
    return traces, draw(rng, noise, (count, 4, 6), **how)


def verdicts(traces, now, decide):
    found = []
    for index in range(len(now.bf16)):
        history = [trace.log_ratios[index].tolist() for trace in traces]
        stored = [[float(np.median(trace.bf16[index]))] for trace in traces]
        found.append(gated(history, now, index, stored, decide))
    return found


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


# -- the promises, on few sessions -----------------------------------------------------------------------------------

FEW = simulate.Plan(healthy=8, disturbed=2, changed=4)


def tallies_of(noise, job, plan=FEW):
    found = simulate.simulate([noise] * simulate.SESSION, MEASURED, plan, job, 0, job.sessions)
    return {tally.rule: tally for tally in found}


@pytest.mark.parametrize("condition", CONDITIONS, ids=lambda c: c.name)
def test_hardly_a_false_alarm_in_healthy_sessions(noise, condition):
    mine = tallies_of(noise, simulate.Job(condition, 0.0, 4, 0.5, 10))[simulate.OURS]
    # One in a hundred is promised: two in ten would be seen once in two hundred times.
    assert mine.alarmed <= 1
    assert mine.cases == 300


def test_regressions_are_caught_and_todays_rules_miss_them(noise):
    found = tallies_of(noise, simulate.Job(QUIET, -0.03, 4, 0.0, 6))
    assert found[simulate.OURS].rate("FAIL") > 0.93
    assert found["Megatron-LM, median +-5 %"].rate("FAIL") < 0.1


def test_a_session_s_part_makes_false_alarms_of_a_rule_that_does_not_know_it(noise):
    rng, count = np.random.default_rng(11), 400
    effects = rng.normal(0, MEASURED.session, (2, count))
    stored = draw(rng, noise, (count, 4, 8), QUIET, 0.0, True, effects[0])
    now = draw(rng, noise, (count, 4, 6), QUIET, 0.0, False, effects[1])

    def alarms(components):
        return sum(one.verdict is Verdict.FAIL for one in verdicts([stored], now, ours(components, 0.005, 30)))

    assert alarms(MEASURED) == 0
    assert alarms(replace(MEASURED, session=1e-5)) > 20


def test_one_session_keeps_its_promises_at_one_per_cent(noise):
    cases = [noise] * simulate.SESSION
    same, slower = (simulate.same_session(cases, FEW, change, 10) for change in (0.0, -0.01))
    assert same.alarmed == 0
    assert slower.rate("FAIL") > 0.9
    assert 2 <= same.builds / same.cases <= slower.builds / slower.cases <= 6


def test_one_session_catches_what_the_docs_say_of_all_recorded_cases():
    measured = histories()
    components = estimate(list(measured.values()), prior=None)
    noises = fit({case: found for case, found in load().items() if not case.endswith("-bf16")}, components)
    cases = [one for one in noises.values() if one.gpu_bound][: simulate.SESSION]
    slower = simulate.same_session(cases, simulate.Plan(), -0.01, 20)
    assert slower.rate("FAIL") > 0.84, "80 % with six blocks a pair"


def test_a_run_is_reproducible_and_two_seeds_differ(noise):
    job = simulate.Job(QUIET, -0.02, 2, 0.5, 2)
    one, same = (tallies_of(noise, job) for _ in range(2))
    assert one == same
    other = tallies_of(noise, job, simulate.Plan(seed=4))
    assert [t.words for t in one.values()] != [t.words for t in other.values()]


def test_cases_that_fail_together_count_for_fewer():
    alike = simulate.Tally("x", "quiet", -0.02, 4, 1.0)
    alike.add([["FAIL"] * 30, ["PASS"] * 30] * 10)
    apart = simulate.Tally("x", "quiet", -0.02, 4, 0.0)
    apart.add([["FAIL", "PASS"] * 15] * 20)
    assert alike.rate("FAIL") == apart.rate("FAIL") == 0.5
    assert alike.caught() == pytest.approx(simulate.wilson(10, 20), abs=0.02)
    assert apart.caught() == pytest.approx(simulate.wilson(300, 600))


def test_replay_gates_each_repeated_session_against_those_before_it():
    level = [[0.1] * 8] * 4
    stored = {"1b-x": {"a": level, "b": level, "c": [[0.05] * 6] * 4}, "1b-y": {"a": level}}
    first, second = replay(stored, 0.02)
    assert (first.stored, first.ours) == (1, "PASS")
    assert (second.stored, second.ours) == (2, "FAIL")
    assert second.change == pytest.approx(math.expm1(-0.05))


def test_intervals_of_rates():
    # Wilson's interval of 0 in 100 and of 50 in 100, as published tables have them.
    assert simulate.wilson(0, 100) == (0.0, pytest.approx(0.0370, abs=2e-4))
    assert simulate.wilson(50, 100) == (pytest.approx(0.4038, abs=2e-4), pytest.approx(0.5962, abs=2e-4))
    assert simulate.wilson(0, 0) == (0.0, 1.0)


def test_the_command_prints_its_tables_and_writes_json(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(simulate.Plan, "healthy", 10)
    monkeypatch.setattr(simulate.Plan, "disturbed", 10)
    monkeypatch.setattr(simulate.Plan, "changed", 10)
    monkeypatch.setattr(simulate, "SESSION", 4)
    monkeypatch.setattr("benchmarks.gate.__main__.load", lambda: {"1b-x": [from_recording(recording(), "x")]})
    monkeypatch.setattr("benchmarks.gate.__main__.run", lambda *what: simulate.run(*what, workers=1))
    assert main(["--quick", "--json", str(tmp_path / "out.json")]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for words in (
        "between sessions:",
        "Sessions of 30 unchanged cases",
        "Megatron-LM",
        "same session",
        "Replay",
        "1b-x",
    ):
        assert words in text
    out = json.loads((tmp_path / "out.json").read_text())
    assert {t["rule"] for t in out["tallies"]} == {
        simulate.OURS,
        simulate.BESIDE,
        simulate.ALONE,
        *(r.name for r in TODAY),
    }
    for tally in out["tallies"]:
        low, high = tally["alarm_interval"]
        assert low <= tally["alarmed"] / tally["sessions"] <= high


def test_noise_scales_with_its_case(noise):
    pooled = np.random.default_rng(0).standard_normal(4000)
    louder = replace(noise, recorded=False, residuals=pooled, sigma_block=0.01, sigma_run=0.0)
    x = draw(np.random.default_rng(10), louder, (300, 1, 24)).log_ratios
    assert x.std(axis=2).mean() == pytest.approx(0.01, rel=0.2)


def test_two_modes_within_an_arm_do_not_pass_for_a_spread_between_processes():
    data = recording(block=0.003, run=0.0, processes=50, seed=3)
    # Turns of two blocks: the first of BF16's is faster than its second, and so is the first of FP8's.
    modes = {"bf16": np.exp([0.0, 0.03]), "fp8": np.exp([-0.02, 0.02])}
    for entry in data["processes"]:
        for arm, factors in modes.items():
            entry[arm] = [float(x) for x in np.asarray(entry[arm]) * np.tile(factors, BLOCKS)]
    quads = fit({"1b-x": [from_recording(data, "x")]}, MEASURED)["1b-x"].residuals
    assert quads.shape == (50, BLOCKS, 4)
    ratios = (quads[..., 0] + quads[..., 3] - quads[..., 1] - quads[..., 2]) / 2
    assert np.median(ratios, axis=1) == pytest.approx(0, abs=1e-12)
