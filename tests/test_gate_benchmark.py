"""The gate's own benchmark: the promises hold on small numbers of sessions, and its command prints what it found."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.gate import simulate
from benchmarks.gate.__main__ import main
from benchmarks.gate.noise import CONDITIONS, QUIET, draw, fit
from benchmarks.gate.recordings import from_recording, histories, load
from benchmarks.gate.replay import replay
from benchmarks.gate.rules import TODAY, ours
from helpers.gate import noise_put_in, recording, verdicts
from pytest_fp8.stats.components import MEASURED, estimate
from pytest_fp8.verdicts import Verdict


@pytest.fixture(scope="module")
def noise():
    return noise_put_in()


FEW = simulate.Plan(healthy=8, disturbed=2, changed=4)


def tallies_of(noise, job, plan=FEW):
    found = simulate.simulate([noise] * simulate.SESSION, MEASURED, plan, job, 0, job.sessions)
    return {tally.rule: tally for tally in found}


@pytest.mark.nightly_beyond(2)
@pytest.mark.parametrize(
    "condition",
    [pytest.param(each, id=each.name, marks=[pytest.mark.nightly] * (each is not QUIET)) for each in CONDITIONS],
)
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
