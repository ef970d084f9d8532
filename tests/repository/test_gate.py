"""The gate's own benchmark: its noise is what was measured, its rules stand where they say, its promises hold."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.gate import simulate
from benchmarks.gate.__main__ import BASELINES, from_recording, histories, load, main, record
from benchmarks.gate.simulate import TODAY, Condition, draw, fit, gated, ours, replay
from helpers.fakes import H200, SUITE, install
from pytest_fp8 import Case
from pytest_fp8.stats.components import MEASURED
from pytest_fp8.verdicts import Verdict

BLOCKS = 24


def recording(block=0.004, run=0.003, processes=4, seed=0, **changes):
    """A recording as a session's report gives one; its noise is what the arguments say."""
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


def noise_put_in():
    """What is fitted to twelve such processes."""
    return fit({"1b-x": [from_recording(recording(processes=12))]}, MEASURED)["1b-x"]


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


@pytest.fixture(scope="module")
def noise():
    return noise_put_in()


# -- the noise ----------------------------------------------------------------------------------------------------


def test_the_fit_finds_the_noise_that_was_put_in_and_a_trace_has_it(noise):
    # Four blocks of 0.4 % make one log ratio: half the square root of their squares' sum.
    assert noise.sigma_block == pytest.approx(0.004, rel=0.1)
    assert (noise.bf16_ms, noise.fp8_ms) == (pytest.approx(120, rel=0.01), pytest.approx(107, rel=0.01))
    x = draw(np.random.default_rng(1), noise, (400, 4, 12)).log_ratios
    assert np.median(x) == pytest.approx(math.log(noise.bf16_ms / noise.fp8_ms), abs=5e-4)
    assert x.std(axis=2).mean() == pytest.approx(noise.sigma_block, rel=0.15)
    between = np.median(x, axis=2).std(axis=1, ddof=1)
    assert math.sqrt((between**2).mean()) == pytest.approx(math.hypot(noise.sigma_run, 1.2 * 0.004 / 12**0.5), rel=0.15)


def test_an_abba_block_is_cut_out_in_the_order_taken_and_a_disturbed_process_left_out():
    data = recording(processes=2)
    data["processes"][0] |= {"bf16": [100.0, 103.0] * 2, "fp8": [81.0, 82.0] * 2}
    data["processes"][1]["strangers"] = 1
    [quads] = from_recording(data).quads
    assert np.exp(quads[0]) == pytest.approx([100, 81, 82, 103])
    data["processes"][0]["throttles"] = ["thermal"]
    with pytest.raises(ValueError, match="no undisturbed process"):
        from_recording(data)


def test_a_change_is_the_fp8_arm_s_alone_and_a_session_moves_the_ratio(noise):
    def drawn(**how):
        return draw(np.random.default_rng(3), noise, (50, 1, 6), **how)

    base, slower, moved = drawn(), drawn(change=-0.05), drawn(session=np.full(50, 0.01))
    assert slower.bf16 == pytest.approx(base.bf16)
    assert slower.fp8 == pytest.approx(base.fp8 / 0.95)
    assert moved.log_ratios - base.log_ratios == pytest.approx(0.01)


def test_what_the_repository_has_can_be_fitted_and_is_of_one_way_of_measuring(tmp_path):
    fitted = fit(load(), MEASURED).values()
    assert any(noise.gpu_bound for noise in fitted)
    assert all(0 < noise.sigma_block < 0.1 for noise in fitted)
    found = histories()
    assert len(found["8b-te-delayed"]) == 4
    assert [session[:4] for session in found["8b-torchao-tensorwise"]][:2] == ["6971", "bb13"], "in the order taken"
    assert not any(session.startswith(("d96f7cf", "df30e8e")) for case in found.values() for session in case)
    assert "1b-te-current" not in load(), "its blocks are of step time, and it is gated on busy time"
    lengths = {len(process) for session in found["1b-te-current"].values() for process in session}
    assert lengths == {26}, "single steps, no blocks"
    here = tmp_path / "h200"
    here.mkdir()
    for name in ("1b-te-current", "1b-te-block"):
        (here / f"{name}.json").write_bytes((BASELINES[0] / f"{name}.json").read_bytes())
    assert histories(baselines=(here, BASELINES[0]))["1b-te-current"] == found["1b-te-current"]


# -- the rules ----------------------------------------------------------------------------------------------------


def test_a_reference_outside_its_band_is_invalid_and_no_regression(noise):
    condition = Condition("common", common=(0.12, 0.15))
    traces, now = histories_of(np.random.default_rng(7), noise, 20, condition=condition, change=-0.08)
    assert {verdict for verdict, _ in verdicts(traces, now, ours(MEASURED, 0.02, 30))} == {Verdict.INVALID}


def test_the_rule_looks_again_and_fails_what_is_slower(noise):
    rng, decide = np.random.default_rng(9), ours(MEASURED, 0.02, 30)
    same, slower = (verdicts(*histories_of(rng, noise, 20, change=change), decide) for change in (0.0, -0.08))
    assert {verdict for verdict, _ in slower} == {Verdict.FAIL}
    assert all(pairs >= 2 for _, pairs in slower)
    assert same.count((Verdict.PASS, 1)) > 15


def test_replay_gates_each_repeated_session_against_those_before_it():
    level = [[0.1] * 8] * 4
    stored = {"1b-x": {"a": level, "b": level, "c": [[0.05] * 6] * 4}, "1b-y": {"a": level}}
    change = pytest.approx(math.expm1(-0.05))
    assert replay(stored, 0.02) == [("1b-x", 1, pytest.approx(0), "PASS"), ("1b-x", 2, change, "FAIL")]


def test_the_command_prints_its_tables(monkeypatch, capsys):
    monkeypatch.setattr(simulate, "SESSION", 4)
    monkeypatch.setattr("benchmarks.gate.__main__.load", lambda: {"1b-x": [from_recording(recording())]})

    def few(noises, components, plan):
        return simulate.run(noises, components, replace(plan, healthy=2, disturbed=2, changed=2))

    monkeypatch.setattr("benchmarks.gate.__main__.run", few)
    assert main([]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for words in ("between sessions:", "Sessions of 30 unchanged cases", *TODAY, "same session", "Replay"):
        assert words in text


# -- recordings ---------------------------------------------------------------------------------------------------


def reported(pytester, monkeypatch, **world):
    """The report of a run of the suite as on a GPU, one of its two cases timed."""
    install(monkeypatch, H200, **world)
    pytester.makepyfile(SUITE)
    pytester.runpytest("--fp8-gpu=h200", "--fp8-report=out", "-k", "test_layers or (test_faster and rowwise)")
    return pytester.path / "out/report.json"


def test_a_runs_report_gives_a_recording_of_each_timed_case(pytester, monkeypatch, tmp_path):
    report = reported(pytester, monkeypatch, speedup=1.0)
    [path] = record(report, tmp_path)
    assert path == tmp_path / "tiny-torchao-rowwise.json", "the other case was not timed"
    content, written = json.loads(report.read_text()), json.loads(path.read_text())
    timing = content["entries"]["tiny-torchao-rowwise"]["timing"]
    assert (written["schema"], written["case"], written["order"]) == (1, "tiny-torchao-rowwise", "abba")
    assert written["case_hash"] == Case("tiny", "torchao", "rowwise").digest()
    assert written["provenance"] == content["provenance"]
    assert [{arm: p[arm] for arm in ("bf16", "fp8")} for p in written["processes"]] == timing["processes"]
    assert all(p["clocks_mhz"] == timing["clocks_mhz"] for p in written["processes"])
    assert [len(x) for x in from_recording(written).quads] == [len(p["fp8"]) // 2 for p in timing["processes"]]
    [second], [third] = (record(report, tmp_path) for _ in range(2))
    assert [second.stem, third.stem] == ["tiny-torchao-rowwise.2", "tiny-torchao-rowwise.3"], "none is overwritten"
