"""The gate benchmark's noise: it is what it was fitted to, and recordings and baselines are read as they were taken."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.gate.noise import CONDITIONS, QUIET, autocorrelation, draw, fit
from benchmarks.gate.recordings import BASELINES, from_recording, histories, load
from helpers.gate import BLOCKS, noise_put_in, recording
from pytest_fp8.stats.components import MEASURED


@pytest.fixture(scope="module")
def noise():
    return noise_put_in()


@pytest.fixture(scope="module")
def stored():
    return fit(load(), MEASURED)


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
