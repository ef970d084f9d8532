"""Processes that were started ahead: nothing is timed while one imports its libraries."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from helpers.fakes import H200, FakeProcess
from helpers.pairs import live_pair
from pytest_fp8 import Case
from pytest_fp8.arms import process as processes
from pytest_fp8.arms.process import IMPORTED, ArmProcess
from pytest_fp8.arms.spares import IMPORT_SECONDS
from pytest_fp8.arms.stopwatch import AHEAD


@pytest.fixture
def clock(monkeypatch):
    """The seconds that have passed: whoever sleeps lets them pass."""
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("time.sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    return now


@pytest.fixture
def importing(monkeypatch, clock):
    """Processes have their libraries after so many seconds."""
    takes = [8.0]
    monkeypatch.setattr(FakeProcess, "has_imported", property(lambda self: not self.alive or clock[0] >= takes[0]))
    return takes


@pytest.fixture
def pair(monkeypatch):
    with live_pair(monkeypatch, H200, Case("1b", "torchao", "tensorwise")) as pair:
        yield pair


def waiting():
    """The live processes that are no arm yet."""
    return [process for process in FakeProcess.world.processes if process.alive and process.spec is None]


@pytest.mark.parametrize(
    ("operation", "waits"), [("blocks", True), ("busy", True), ("curve", False), ("logits", False)]
)
def test_what_is_timed_waits_for_imports_and_nothing_else_does(pair, importing, clock, monkeypatch, operation, waits):
    when = []
    monkeypatch.setattr(FakeProcess, operation, lambda self, **_: when.append(clock[0]), raising=False)
    pair.fp8.request(operation)
    pair.fp8.request(operation)
    assert when == ([pytest.approx(8.0, abs=0.1)] * 2 if waits else [0.0] * 2)
    told = pair.fp8.pool.stopwatch.waited.get((AHEAD, "build"), 0.0)
    assert told == pytest.approx(8.0 if waits else 0.0, abs=0.1), "the wait is in the account of the session's time"


def test_what_never_has_its_libraries_is_ended_and_waited_for_once(pair, importing, clock, monkeypatch):
    importing[0] = float("inf")
    monkeypatch.setattr(FakeProcess, "blocks", lambda self, **_: clock[0], raising=False)
    assert waiting()
    assert [pair.fp8.request("blocks") for _ in range(2)] == [pytest.approx(IMPORT_SECONDS, abs=0.1)] * 2
    assert not waiting()
    assert pair.fp8.pool.spares.skipped
    pair.renew()
    assert pair.fp8.request("blocks") == pytest.approx(IMPORT_SECONDS, abs=0.1), "its kind is not started ahead again"


@pytest.mark.slow
def test_a_process_says_when_it_has_its_libraries():
    process = ArmProcess()
    try:
        assert not process.has_imported
        deadline = time.monotonic() + 60
        while not process.has_imported and time.monotonic() < deadline:
            time.sleep(0.05)
        assert process.alive
        (process.folder / IMPORTED).unlink()
        assert process.has_imported, "who has them keeps them when the folder is deleted"
    finally:
        process.close()


def test_ranks_have_their_libraries_when_each_has(monkeypatch):
    coming = [SimpleNamespace(has_imported=has, close=lambda: None) for has in (True, False)]
    monkeypatch.setattr(processes, "Rank", lambda *_: SimpleNamespace(has_imported=True))
    arm = ArmProcess()
    arm.ranks = coming
    assert not arm.has_imported
    coming[1].has_imported = True
    assert arm.has_imported
