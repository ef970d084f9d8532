"""Rehearsals of large models, of which one layer is built ahead: they stop for what is timed, and leave no process."""

from __future__ import annotations

import pytest

from helpers.fakes import H100, H200, FakeProcess, install
from helpers.later_arms import RECIPES, arms_of, pairs, started
from pytest_fp8 import Case
from pytest_fp8.arms.pair import make_arm
from pytest_fp8.arms.pool import ArmPool


@pytest.fixture
def world(monkeypatch):
    return install(monkeypatch, H200)


@pytest.fixture
def slow_rehearsals(monkeypatch):
    """Rehearsals do not answer until this list is filled."""
    answers: list[bool] = []
    done = property(lambda self: bool(answers) or self.spec is None or not self.spec.rehearses)
    monkeypatch.setattr(FakeProcess, "has_answered", done)
    return answers


def rehearsals(pool, *recipes):
    cases = [Case("8b1", "torchao", recipe) for recipe in recipes]
    return [make_arm(each, pool, None, "", rehearses=True) for case in cases for each in (case.reference(), case)]


def test_a_rehearsal_leaves_no_process(world):
    pool = ArmPool(H200)
    [tiny] = pairs(pool, "tiny", "tensorwise")
    tiny.start(rehearsals(pool, "rowwise"))
    assert started(world)[2:] == ["8b1-bf16", "8b1-torchao-rowwise"]
    tiny.start(rehearsals(pool, "rowwise"))
    assert started(world) == ["tiny-bf16", "tiny-torchao-tensorwise"], "they are closed, and not begun again"
    assert world.built.count("8b1-torchao-rowwise") == 1
    pool.close()


def test_a_rehearsal_that_is_not_done_is_stopped_for_what_is_timed_and_begins_again(world, slow_rehearsals):
    pool = ArmPool(H200)
    [tiny] = pairs(pool, "tiny", "tensorwise")
    tiny.start(rehearsals(pool, "rowwise"))
    pool.wait_for_builds()
    assert started(world) == ["tiny-bf16", "tiny-torchao-tensorwise"]
    assert not any(name.startswith("8b1") for name in world.built), "nobody waited for it"
    tiny.start(rehearsals(pool, "rowwise"))
    assert started(world)[2:] == ["8b1-bf16", "8b1-torchao-rowwise"]
    slow_rehearsals.append(True)
    pool.wait_for_builds()
    assert world.built[2:] == ["8b1-bf16", "8b1-torchao-rowwise"]
    pool.close()


def test_one_layer_as_a_case_of_its_own_is_no_rehearsal(world):
    pool = ArmPool(H200)
    tiny, mine = pairs(pool, "tiny", "tensorwise")[0], pairs(pool, "8b1", "rowwise")[0]
    tiny.start([*rehearsals(pool, "rowwise"), *arms_of(mine)])
    mine.start()
    assert started(world) == ["8b1-bf16", "8b1-torchao-rowwise"]
    assert mine.fp8.request("logits", seed=0)
    pool.close()


def test_builds_under_way_make_room_for_the_next_pair(world, slow_rehearsals):
    """On an H100 two arms of 1B and four rehearsals would take 112 GiB, as estimated."""
    pool = ArmPool(H100)
    [tiny], [small] = pairs(pool, "tiny", "tensorwise"), pairs(pool, "1b", "tensorwise")
    tiny.start(rehearsals(pool, *RECIPES))
    assert len(started(world)) == 2 + 4
    small.start(rehearsals(pool, *RECIPES), timed=True)
    assert started(world) == ["1b-bf16", "1b-torchao-tensorwise"]
    pool.close()
