"""The variance components: found again in what was drawn with them, robust, and stored beside the baselines."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from helpers.baselines import baseline
from pytest_fp8.baselines.record import Baseline, StoredSession
from pytest_fp8.baselines.review import compare_metric
from pytest_fp8.baselines.store import Folder, components_in, estimated, write_baseline
from pytest_fp8.stats.components import MEASURED, estimate
from pytest_fp8.stats.looks import against_history
from pytest_fp8.verdicts import Verdict

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.gate.recordings import BASELINES, histories, on_busy_time, stored_in

SESSION, PROCESS, BLOCK = 0.004, 0.002, 0.007
NAMES = ("monday", "tuesday", "friday", "sunday")


def drawn(seed=0, cases=40, names=NAMES, processes=4, blocks=8):
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(cases):
        level = rng.normal(0.1, 0.1)
        found.append({})
        for name in names:
            middle = level + rng.normal(0, SESSION)
            each = middle + rng.normal(0, PROCESS, (processes, 1))
            found[-1][name] = (each + rng.normal(0, BLOCK, (processes, blocks))).tolist()
    return found


def test_components_are_found_again():
    found = estimate(drawn(seed=1), prior=None)
    assert found.session == pytest.approx(SESSION, rel=0.15)
    assert found.process == pytest.approx(PROCESS, rel=0.3)
    assert found.block == pytest.approx(BLOCK, rel=0.05)
    assert (found.sessions, found.processes) == (120, 480)


def test_one_wild_case_in_ten_hardly_moves_them():
    histories = drawn()
    for history in histories[:3]:
        for name, session in history.items():
            wild = 20 * (NAMES.index(name) - 1.5) * SESSION
            history[name] = [[x + wild for x in process] for process in session]
    assert estimate(histories, prior=None).session < 1.6 * SESSION


def test_few_sessions_fall_back_on_what_was_measured_so_far():
    one = estimate(drawn(names=NAMES[:1]))
    assert (one.session, one.sessions) == (MEASURED.session, MEASURED.sessions)
    assert one.process == pytest.approx(PROCESS, rel=0.4)
    two = estimate(drawn(cases=2, names=NAMES[:2]))
    assert two.sessions == MEASURED.sessions + 2
    many = estimate(drawn())
    assert abs(many.session - SESSION) < abs(many.session - MEASURED.session)
    assert estimate([]) == MEASURED


def busy_baseline(ratios):
    metrics = [
        {
            "busy_speedup": [[math.log(ratio)] * 26] * 2,
            "speedup": [[0.0] * 8] * 2,
            "bf16_ms": [100.0] * 2,
            "fp8_ms": [100.0] * 2,
        }
        for ratio in ratios
    ]
    stored = [
        StoredSession(
            "2026-11-23", "abc", False, "why", {"name": "NVIDIA H200"}, {}, f"{k:012x}", each, host_bound=True
        )
        for k, each in enumerate(metrics)
    ]
    return Baseline("1b-te-current", "0" * 16, "h200", tuple(stored))


def test_few_busy_times_of_a_gpu_s_own_leave_what_was_measured_so_far():
    found = estimated([busy_baseline([1.193, 1.204, 1.181, 1.199])])
    assert (found.busy, found.busy_sessions) == (MEASURED.busy, MEASURED.busy_sessions)
    assert (found.session, found.sessions) == (MEASURED.session, MEASURED.sessions), "no step time is among them"
    assert (found.block, found.blocks) == (MEASURED.block, MEASURED.blocks), "nor a block"
    many = estimated([busy_baseline([1.0, 1.01] * 4), busy_baseline([1.2, 1.21] * 4)])
    assert many.busy_sessions == 14
    assert many.busy == pytest.approx(0.0053, rel=0.2)


def test_what_sessions_of_busy_times_differ_by_is_noise_to_an_update_and_to_a_gate():
    """Transformer Engine at 1B on three H200s, whose hosts let its steps wait by different times."""
    first, second, third = ([[math.log(ratio)] * 26] * 2 for ratio in (1.193, 1.204, 1.181))
    assert not compare_metric("busy_speedup", [first, second], third).moved
    assert compare_metric("speedup", [first, second], third).moved
    lost = [[math.log(1.181)] * 26] * 4
    of_steps, of_busy = (against_history(lost, [first, second], components=c) for c in (MEASURED, MEASURED.of_busy()))
    assert of_busy.verdict is Verdict.PASS
    assert of_busy.tolerance > of_steps.tolerance


def test_what_was_measured_first_agrees_with_what_the_repository_s_data_say_today():
    every, on_busy = histories(), on_busy_time(stored_in(BASELINES))
    found = estimate(list(every.values()), prior=None)
    # A busy time is a single step's, which scatters more than blocks do.
    of_steps = estimate([sessions for case, sessions in every.items() if case not in on_busy], prior=None)
    assert found.session == pytest.approx(MEASURED.session, rel=0.2)
    assert of_steps.block == pytest.approx(MEASURED.block, rel=0.25), (
        "later blocks agree better: those of 8B's long steps"
    )
    assert 0 < found.process <= MEASURED.process, "later processes agree better"


def test_a_gpu_s_components_are_of_its_own_histories(tmp_path):
    [history] = drawn(cases=1, names=NAMES[:1])
    mine = baseline("1b-x", "0" * 16, metrics={"speedup": [[x - 0.1 for x in each] for each in history["monday"]]})
    write_baseline(tmp_path, mine)
    alone = components_in(Folder(tmp_path), "h200")
    assert alone == estimated([mine]) != MEASURED
    write_baseline(tmp_path, replace(mine, gpu="h100", case="1b-y"))
    (tmp_path / "h200" / "1b-z.json").write_text("{")
    assert components_in(Folder(tmp_path), "h200") == alone, "the tests of a file that cannot be read fail with it"
    assert components_in(Folder(tmp_path), "l40s") == MEASURED
