"""Noise or moved: by simulation, how often an unchanged baseline is rewritten and a changed one left."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from helpers.baselines import baseline, session
from pytest_fp8.baselines.record import MAX_SESSIONS, Baseline
from pytest_fp8.baselines.review import compare_histories, compare_metric, revise, tampering
from pytest_fp8.baselines.update import appended, why_not_stored
from pytest_fp8.stats.components import MEASURED

BETWEEN, WITHIN = 0.003, 0.004


def measured(rng, processes=2, change=0.0, between=BETWEEN):
    return [list(0.11 + change + rng.normal(0, between) + rng.normal(0, WITHIN, 6)) for _ in range(processes)]


@pytest.mark.parametrize(
    ("words", "change", "processes", "between", "least"),
    [
        (["noise"], 0.0, 2, 0.003, 0.96),
        (["noise"], 0.0, 4, 0.006, 0.96),
        (["worse"], -0.05, 2, 0.003, 0.98),
        (["better"], 0.05, 2, 0.003, 0.98),
        (["moved", "worse"], -0.02, 4, 0.003, 0.9),
    ],
)
def test_noise_is_left_alone_and_a_change_beyond_it_moves_a_speedup(words, change, processes, between, least):
    rng = np.random.default_rng(3)

    def word():
        before, now = (measured(rng, processes, by, between) for by in (0.0, change))
        return compare_metric("speedup", [before], now, tolerance=0.03).word

    assert np.mean([word() in words for _ in range(500)]) > least


@pytest.mark.parametrize(
    ("name", "old", "new", "word"),
    [
        ("fp8_share", 0.78, 0.78 + 1e-12, "noise"),
        ("fp8_share", 0.78, 0.78 - 1e-6, "worse"),
        ("fp8_share", 0.78, 0.79, "better"),
        ("memory_ratio", 0.85, 0.866, "noise"),
        ("memory_ratio", 0.85, 0.868, "worse"),
        ("loss_gap", -0.03, -0.015, "noise"),
        ("loss_gap", -0.03, 0.0, "worse"),
        ("fp8_share", 1.0, 1.0, "same"),
        ("fp8_share", None, 1.0, "new"),
        ("fp8_share", 1.0, None, "not measured"),
        ("bf16_ms", 120.0, 140.0, "moved"),
    ],
)
def test_exact_metrics_move_at_once_and_banded_ones_beyond_their_band(name, old, new, word):
    before, now = [[[old]] if old is not None else [], [new] if new is not None else []]
    assert compare_metric(name, before, now).word == word


LUCKY, ALIKE = [[[x] * 6] * 4 for x in (0.11, 0.111, 0.109, 0.12)], [[[0.1] * 6] * 4] * 4


@pytest.mark.parametrize(
    ("levels", "now", "components", "word"),
    [
        # One session that lay 1 % high by chance is not the level of four.
        (LUCKY, 0.11, MEASURED, "noise"),
        (LUCKY, 0.07, MEASURED, "worse"),
        # A GPU whose sessions differ by 1.5 % has not moved by 2 %; its gate says the same.
        (ALIKE, 0.08, MEASURED, "moved"),
        (ALIKE, 0.08, replace(MEASURED, session=0.015), "noise"),
    ],
)
def test_a_session_is_compared_with_a_whole_history_by_the_components_of_its_gpu(levels, now, components, word):
    assert compare_metric("speedup", levels, [[now] * 6] * 4, components=components).word == word


# -- sessions -----------------------------------------------------------------------------------------------------


def stored(*shares, **metrics):
    """A baseline of one session per share, on one day each."""
    sessions = [session(metrics={"fp8_share": [x], **metrics}, date=f"2026-11-{10 + i}") for i, x in enumerate(shares)]
    return Baseline("c", "h", "h200", tuple(sessions))


def later(day=28, **metrics):
    return baseline("c", "h", metrics=metrics, date=f"2026-11-{day}", run=f"{day:012}")


def added(old, new):
    return appended(old, new, revise(old, new).starts())


def test_a_session_that_moved_nothing_joins_the_level_and_one_that_moved_begins_another():
    now = added(stored(0.5, memory_ratio=[0.9]), later(fp8_share=[0.5], memory_ratio=[0.95]))
    assert [s.starts for s in now.sessions] == [(), ("memory_ratio",)]
    assert now.history("fp8_share") == [[0.5], [0.5]]
    assert now.history("memory_ratio") == [[0.95]]


SPEED, STEPS = {"speedup": [[0.1] * 6] * 4}, {"bf16_ms": [100.0] * 4, "fp8_ms": [90.0] * 4}
ON_BUSY = {**SPEED, "busy_speedup": [[0.2] * 5] * 4, **STEPS}
SLOW_HOST = {**ON_BUSY, "speedup": [[-0.1] * 6] * 4, "fp8_ms": [110.0] * 4}


@pytest.mark.parametrize(
    ("old", "new", "starts", "worse"),
    [
        # What was timed together begins a level together, and a slower host begins none.
        (SPEED, {"speedup": [[0.2] * 6] * 4}, ["speedup", "bf16_ms", "fp8_ms"], False),
        (SPEED, {**SPEED, "bf16_ms": [150.0] * 4}, [], False),
        # Nor do step times that the host decides, which are never worse. Busy times silence none that are stored.
        (ON_BUSY, SLOW_HOST, [], False),
        (ON_BUSY, {"busy_speedup": [[0.1] * 5] * 4}, None, True),
        (SPEED, {"speedup": [[0.0] * 6] * 4, "busy_speedup": [[0.2] * 5] * 4}, None, True),
    ],
)
def test_which_metrics_begin_a_level_and_which_are_worse(old, new, starts, worse):
    revision = revise(baseline("c", "h", metrics=old), later(**new))
    assert revision.worse is worse
    assert starts is None or revision.starts() == starts


def test_an_account_is_kept_and_not_compared_and_its_edit_is_found():
    told, speed = {"casts_ms": [9.0], "earned_ms": [20.0]}, {"speedup": [[0.1] * 6] * 4}
    old, new = baseline("c", "h", metrics={**speed, **told}), later(**speed, **{**told, "casts_ms": [90.0]})
    assert (revise(old, new).changed, revise(old, new).starts()) == (False, [])
    assert added(old, new).newest.metrics["casts_ms"] == [90.0]
    assert tampering(old, baseline("c", "h", metrics={**speed, **told, "casts_ms": [90.0]}))


def test_a_full_file_loses_its_oldest_session():
    full = stored(*[0.5] * MAX_SESSIONS)
    assert len(full.sessions) == MAX_SESSIONS
    now = added(full, later(fp8_share=[0.5]))
    assert now.sessions[:-1] == full.sessions[1:]
    assert tampering(full, now) == ""
    assert compare_histories(full, now).worse is False


def without(index):
    return lambda sessions: sessions[:index] + sessions[index + 1 :]


@pytest.mark.parametrize(
    "change",
    [
        without(0),
        without(2),
        lambda s: (session(metrics={"fp8_share": [0.4]}, date="2026-11-10"), *s[1:]),
        lambda s: (session(metrics={"fp8_share": [0.5]}, date="2026-11-10", reason="x"), *s[1:]),
        lambda s: (*s[:1], *later(fp8_share=[0.5]).sessions, *s[1:]),
        lambda s: s[::-1],
    ],
    ids=["oldest gone", "newest gone", "edited", "another reason", "put before older ones", "reversed"],
)
def test_a_history_that_was_touched_is_worse(change):
    old = stored(0.5, 0.5, 0.5)
    revision = compare_histories(old, Baseline("c", "h", "h200", tuple(change(old.sessions))))
    assert revision.worse
    assert "not the stored ones" in revision.tampered


def test_a_metric_that_is_gone_was_removed():
    old = Baseline("c", "h", "h200", (session(metrics={"fp8_share": [0.5], "memory_ratio": [0.9]}),))
    revision = compare_histories(old, later(fp8_share=[0.5]))
    assert {change.metric: change.word for change in revision.changes}["memory_ratio"] == "removed"
    assert revision.worse


@pytest.mark.parametrize(
    ("question", "verdict", "why"),
    [
        ("layers", "FAIL", "FP8 was not shown to run"),
        ("speedup", "INVALID", "the timing is invalid"),
        ("faster", "INVALID", "the timing is invalid"),
        ("memory", "INVALID", "the memory question is invalid"),
        *((name, "FAIL", f"the {name} question failed") for name in ("numerics", "loss", "checkpoints")),
        # A change for the worse may be accepted, and is what an update is for.
        ("speedup", "FAIL", ""),
        ("memory", "FAIL", ""),
        ("loss", "INCONCLUSIVE", ""),
    ],
)
def test_what_is_wrong_of_a_session_keeps_its_figures_out_of_the_baselines(question, verdict, why):
    answers = {"layers": "PASS", question: verdict}
    decisions = {name: SimpleNamespace(verdict=each, headline="seen") for name, each in answers.items()}
    entry = SimpleNamespace(namesakes=0, errors=(), decisions=decisions)
    said = why_not_stored(SimpleNamespace(entries={"1b": entry}, open_tests={}), "1b")
    assert said == (why and f"{why} (seen)")
