"""Which cases a worker of pytest-xdist takes, in which order, and how many cores it has."""

from __future__ import annotations

import pytest

pytest.importorskip("xdist")

from helpers.workers import session_on_gpus
from pytest_fp8.arms.pair import cpu_threads
from pytest_fp8.xdist import model_of, next_unit


@pytest.fixture
def host(pytester, monkeypatch):
    return session_on_gpus(pytester, monkeypatch)


def shared_out(cases, seconds, workers):
    """Who takes which cases, where each takes so many seconds and a worker's first case of a model takes more."""
    waiting, at = list(cases), {}
    free = dict.fromkeys(range(workers), 0.0)
    taken = {worker: [] for worker in free}
    while waiting:
        worker = min(free, key=free.get)
        mine = at.pop(worker, None)
        case = next_unit(waiting, mine, at.values())
        waiting.remove(case)
        at[worker] = model_of(case)
        free[worker] += seconds[model_of(case)] + (60 if model_of(case) != mine else 0)
        taken[worker].append(case)
    return taken, max(free.values())


def test_the_cases_of_a_model_go_to_as_few_workers_as_keeps_all_busy():
    seconds = {"8b": 75, "1b": 45, "tiny": 12}
    cases = [f"{model}-{number}" for model in seconds for number in range(6)]
    taken, together = shared_out(cases, seconds, 2)
    assert [model_of(case) for case in taken[0]] == ["8b"] * 6, "one worker builds the largest reference, once"
    alone = shared_out(cases, seconds, 1)[1]
    assert together < 0.56 * alone
    assert shared_out(cases, seconds, 4)[1] < 0.4 * alone
    taken, _ = shared_out(cases, seconds, 7)
    assert sorted(case for mine in taken.values() for case in mine) == sorted(cases)


def test_what_a_worker_takes_next():
    waiting = ["8b-a", "8b-b", "1b-a", "tiny-a"]
    assert next_unit(waiting, None, []) == "8b-a"
    assert next_unit(waiting, None, ["8b"]) == "1b-a"
    assert next_unit(waiting, "1b", ["8b"]) == "1b-a"
    assert next_unit(waiting, "tiny", ["8b", "1b"]) == "tiny-a"
    assert next_unit(waiting[:3], "tiny", ["8b", "1b"]) == "8b-a"


def test_arms_on_the_cpu_share_its_cores_with_those_of_other_workers(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(8))
    threads = {}
    for workers in (1, 2, 16):
        monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", str(workers))
        threads[workers] = cpu_threads(1), cpu_threads(2)
    assert threads == {1: (4, 2), 2: (2, 1), 16: (1, 1)}, "two arms beside each other"


ORDER = """
    from pathlib import Path
    import pytest
    from pytest_fp8 import Case

    CASES = [Case(m, "torchao", r) for m in ("tiny", "1b", "8b") for r in ("tensorwise", "rowwise")]

    @pytest.mark.fp8(cases=CASES, question="layers")
    def test_layers(fp8_case):
        with Path("order").open("a") as order:
            order.write(fp8_case.model + " ")
"""


@pytest.mark.nightly_beyond(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "order"),
    [
        (["-n1", "--fp8-gpu=h200"], "8b 8b 1b 1b tiny tiny"),
        (["--fp8-gpu=h200"], "tiny tiny 1b 1b 8b 8b"),
        (["-n1"], "tiny tiny 1b 1b 8b 8b"),
    ],
    ids=["worker of a gate", "gate", "worker"],
)
def test_workers_of_a_gate_begin_with_the_largest_models(host, pytester, monkeypatch, options, order):
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    pytester.makepyfile(ORDER)
    host(1, *options)[0].assert_outcomes(passed=6)
    assert (pytester.path / "order").read_text().split() == order.split()
