"""Processes that wait for the arms of the next case: how many, for which, and what becomes of them. Arms are fakes."""

from __future__ import annotations

import pytest

from helpers.fakes import H200, install
from helpers.later_arms import ahead, pairs, spares
from pytest_fp8 import Case
from pytest_fp8.arms.pair import PairArms
from pytest_fp8.arms.pool import ArmPool
from pytest_fp8.markers import next_case, running
from pytest_fp8.options import Settings

RECIPES = ("tensorwise", "rowwise")


@pytest.fixture
def world(monkeypatch):
    return install(monkeypatch, H200)


def test_a_process_that_was_started_ahead_is_no_stranger(world):
    pool = ArmPool(H200)
    one, two = pairs(pool, "8b", "tensorwise", "rowwise")
    one.start(ahead(pool, [two]))
    waiting = {process.pid for process in spares(world)}
    assert waiting
    assert waiting < pool.pids
    pool.close()


def test_ranks_wait_for_a_case_of_several_gpus_and_for_no_other(world):
    pool = ArmPool(H200)
    two_gpus = PairArms(Case("8b", "torchao", "rowwise", batch=4, gpus=2, parallel="fsdp2"), pool, None)
    [one] = pairs(pool, "8b", "tensorwise")
    one.start(then=ahead(pool, [two_gpus]))
    waiting = [process for process in spares(world) if process.ranks > 1]
    assert [process.backend for process in waiting] == ["torchao"]
    assert {process.pid for process in waiting} <= pool.pids
    two_gpus.start()
    assert waiting[0].spec.case == two_gpus.fp8.spec.case
    pool.close()


def test_what_waits_for_arms_that_do_not_come_ends(world):
    pool = ArmPool(H200)
    one, two = pairs(pool, "8b", "tensorwise", "rowwise")
    te = PairArms(Case("8b", "transformer_engine", "current"), pool, None)
    one.start(then=ahead(pool, [te]))
    waiting = [process for process in spares(world) if process.backend == "transformer_engine"]
    assert len(waiting) == 1
    pool.end_but()
    two.start()
    assert not waiting[0].alive
    pool.close()


def test_no_process_waits_for_a_case_on_the_cpu(world):
    pool = ArmPool(None)
    pair, later = (PairArms(Case("tiny", "torchao", recipe, emulated=True), pool, None) for recipe in RECIPES)
    pair.start(ahead(pool, [later]))
    assert not spares(world)
    pool.close()


FIRST = Case("1b", "torchao", "tensorwise", checkpoint_formats=("safetensors", "dcp"), tolerance=0.03)
LATER = [Case("8b", "transformer_engine", "current"), Case("1b", "torchao", "rowwise", floor=0.9)]


def test_processes_start_for_the_next_case():
    assert next_case([FIRST, *LATER], FIRST) == [LATER[0].reference(), LATER[0]]
    assert next_case([FIRST, *LATER], LATER[-1]) == []


def test_in_a_worker_processes_start_for_the_next_case_of_the_same_model():
    assert next_case([FIRST, *LATER], FIRST, is_worker=True) == [LATER[1].reference(), LATER[1]]
    assert next_case([FIRST, LATER[0]], FIRST, is_worker=True)[1] == LATER[0], "it may be given another model"


def test_no_process_starts_for_a_case_that_does_not_run_here(world, monkeypatch):
    eight = Case("8b", "torchao", "rowwise", gpus=8, batch=8, parallel="fsdp2")
    emulated = Case("tiny", "torchao", "rowwise", emulated=True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    here = running([FIRST, eight, emulated], Settings(gpu="h200"))
    assert here == [FIRST]
    assert next_case(here, FIRST) == []
