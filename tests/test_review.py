"""Noise or moved: by simulation, how often an unchanged baseline is rewritten and a changed one left."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.baselines import ORIGIN
from pytest_fp8.baselines.review import compare_metric, revise, revised
from pytest_fp8.baselines.store import Baseline

SPEED = {"unit": "log ratio, BF16 over FP8 step time", "direction": "higher", "tolerance": 0.03}
BETWEEN, WITHIN = 0.003, 0.004


def measured(rng, processes=2, change=0.0, between=BETWEEN):
    return {
        **SPEED,
        "values": [list(0.11 + change + rng.normal(0, between) + rng.normal(0, WITHIN, 6)) for _ in range(processes)],
    }


def rate(words, change=0.0, processes=2, repeats=800, between=BETWEEN):
    rng = np.random.default_rng(3)
    seen = [
        compare_metric(
            "speedup", measured(rng, processes, 0.0, between), measured(rng, processes, change, between)
        ).word
        for _ in range(repeats)
    ]
    return np.mean([word in words for word in seen])


def metric(value, tolerance, unit="share", direction="higher"):
    return {"unit": unit, "direction": direction, "tolerance": tolerance, "values": [value]}


@pytest.mark.parametrize(("processes", "between"), [(2, 0.003), (4, 0.003), (4, 0.006)])
def test_an_unchanged_speedup_is_left_alone(processes, between):
    assert rate(("noise",), processes=processes, between=between) > 0.96


def test_a_change_well_beyond_the_noise_moves_it():
    assert rate(("worse",), change=-0.05) > 0.98
    assert rate(("better",), change=0.05) > 0.98
    assert rate(("moved", "worse"), change=-0.02, processes=4) > 0.9


def test_a_change_within_the_tolerance_is_never_called_worse():
    assert rate(("worse",), change=-0.015, processes=4) < 0.01


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        (metric(0.78, 0.0), metric(0.78 + 1e-12, 0.0), "noise"),
        (metric(0.78, 0.0), metric(0.78 - 1e-6, 0.0), "worse"),
        (metric(0.78, 0.0), metric(0.79, 0.0), "better"),
        (metric(0.85, 0.02, "a over b", "lower"), metric(0.866, 0.02, "a over b", "lower"), "noise"),
        (metric(0.85, 0.02, "a over b", "lower"), metric(0.868, 0.02, "a over b", "lower"), "worse"),
        (metric(-0.03, 0.02, "nats", "lower"), metric(-0.015, 0.02, "nats", "lower"), "noise"),
        (metric(-0.03, 0.02, "nats", "lower"), metric(0.0, 0.02, "nats", "lower"), "worse"),
        (metric(1.0, 0.1), metric(1.0, 0.1), "same"),
        (None, metric(1.0, 0.1), "new"),
        (metric(1.0, 0.1), None, "not measured"),
    ],
)
def test_exact_metrics_move_at_once_and_banded_ones_beyond_their_band(old, new, word):
    assert compare_metric("a metric", old, new).word == word


def test_a_slower_host_is_nothing_bad_about_fp8():
    old, new = (metric(x, 0.08, "ms per step", "lower") for x in (120.0, 140.0))
    assert compare_metric("bf16_ms", old, new).word == "moved"


def test_a_lower_band_cannot_be_smuggled_in_with_the_new_file():
    old, new = metric(0.85, 0.02, "a over b", "lower"), metric(0.95, 0.5, "a over b", "lower")
    assert compare_metric("memory_ratio", old, new).word == "worse"


def test_values_of_another_shape_are_new():
    flat = {**SPEED, "values": [0.1, 0.11]}
    assert compare_metric("speedup", flat, measured(np.random.default_rng(0))).word == "new"


def test_kept_metrics_keep_their_first_origin_over_several_updates():
    def version(share, memory, date):
        return Baseline(
            "c",
            "h",
            "h200",
            {"fp8_share": metric(share, 0.0), "memory_ratio": metric(memory, 0.02, "a over b", "lower")},
            {**ORIGIN, "date": date, "commit": date},
        )

    stored = version(0.5, 1.0, "one")
    for new in (version(0.6, 1.0, "two"), version(0.7, 1.001, "three")):
        stored = revised(stored, new, revise(stored, new))
    assert stored.values("fp8_share") == [0.7]
    assert stored.values("memory_ratio") == [1.0]
    assert stored.provenance == {
        **ORIGIN,
        "date": "three",
        "commit": "three",
        "kept": {"memory_ratio": {"date": "one", "commit": "one"}},
    }


def test_two_cases_are_never_compared():
    with pytest.raises(ValueError, match="not the same baseline"):
        revise(Baseline("a", "h", "h200", {}, ORIGIN), Baseline("b", "h", "h200", {}, ORIGIN))
