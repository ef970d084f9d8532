"""Arms of later cases are built while today's pair answers; nothing is timed meanwhile."""

from __future__ import annotations

import pytest

from helpers.fakes import H200, FakeProcess, install
from helpers.later_arms import GIB, RECIPES, arms_of, pairs, started
from pytest_fp8 import ArmError, Case
from pytest_fp8.arms.asked import BUILD_SECONDS
from pytest_fp8.arms.meanwhile import PATIENCE_SECONDS
from pytest_fp8.arms.pair import PairArms
from pytest_fp8.arms.pool import ArmPool
from pytest_fp8.codes import R


@pytest.fixture
def world(monkeypatch):
    return install(monkeypatch, H200)


def test_later_arms_begin_while_the_pair_answers_and_nobody_waits(world):
    pool = ArmPool(H200)
    one, two, three = pairs(pool, "1b", *RECIPES)
    one.start(arms_of(two, three))
    assert started(world) == ["1b-bf16", *(f"1b-torchao-{recipe}" for recipe in RECIPES)]
    assert world.built == ["1b-bf16", "1b-torchao-tensorwise"], "the others have not answered"
    two.start(arms_of(three))
    three.start()
    assert sorted(world.built) == sorted(set(world.built)), "each arm was built once"
    pool.close()
    assert not started(world)


def test_nothing_begins_before_the_pair_is_timed(world):
    pool = ArmPool(H200)
    one, two = pairs(pool, "1b", *RECIPES[:2])
    one.start(arms_of(two), timed=True)
    assert started(world) == ["1b-bf16", "1b-torchao-tensorwise"]
    one.start(arms_of(two))
    assert started(world)[2:] == ["1b-torchao-rowwise"]
    one.renew()
    assert "1b-torchao-rowwise" in started(world), "a fresh pair closes no arm of a later case"
    pool.close()


@pytest.mark.parametrize(
    ("operation", "waits"),
    [("blocks", True), ("busy", True), ("call", True), ("layers", True), ("curve", False), ("logits", False)],
)
def test_what_is_timed_waits_for_builds_and_nothing_else_does(world, monkeypatch, operation, waits):
    pool = ArmPool(H200)
    one, two = pairs(pool, "1b", *RECIPES[:2])
    one.start(arms_of(two))
    when: list[list[str]] = []
    monkeypatch.setattr(FakeProcess, operation, lambda self, **_: when.append(list(world.built)), raising=False)
    one.fp8.request(operation)
    assert ("1b-torchao-rowwise" in when[0]) is waits
    pool.close()


def test_a_profile_waits_for_no_build_where_no_speed_is_asked(world):
    pool = ArmPool(H200)
    cases = [Case("tiny", "torchao", recipe, questions=("layers", "loss")) for recipe in RECIPES[:2]]
    one, two = (PairArms(case, pool, None) for case in cases)
    one.start(arms_of(two))
    one.fp8.request("layers")
    assert "tiny-torchao-rowwise" not in world.built
    pool.close()


def test_the_arms_of_another_model_begin_and_large_ones_do_not(world):
    pool = ArmPool(H200)
    [tiny], [small], [large] = (pairs(pool, model, "tensorwise") for model in ("tiny", "1b", "8b"))
    tiny.start(arms_of(small, large, tiny))
    assert started(world) == ["tiny-bf16", "tiny-torchao-tensorwise", "1b-bf16", "1b-torchao-tensorwise"]
    small.start(arms_of(large))
    large.start(arms_of(small))
    assert started(world) == ["8b-bf16", "8b-torchao-tensorwise"]
    pool.close()


def test_an_arm_that_fails_ahead_is_built_again_for_its_own_test_alone(world):
    pool = ArmPool(H200)
    one, two = pairs(pool, "1b", *RECIPES[:2])
    world.fails["1b-torchao-rowwise"] = R.ARM_DIED
    one.start(arms_of(two))
    pool.wait_for_builds()
    one.start(arms_of(two))
    assert started(world) == ["1b-bf16", "1b-torchao-tensorwise"], "it is not tried ahead again"
    with pytest.raises(ArmError, match="1b-torchao-rowwise"):
        two.start()
    assert started(world) == ["1b-bf16"]
    del world.fails["1b-torchao-rowwise"]
    two.start()
    assert started(world) == ["1b-bf16", "1b-torchao-rowwise"]
    pool.close()


def test_a_test_waits_less_long_for_another_s_arm_than_that_one_may_take(world, monkeypatch):
    waits: dict[str, float] = {}
    receive = FakeProcess.receive

    def noted(self, timeout=0):
        waits[self.spec.case.id] = timeout
        return receive(self, timeout)

    monkeypatch.setattr(FakeProcess, "receive", noted)
    pool = ArmPool(H200)
    one, two = pairs(pool, "1b", *RECIPES[:2])
    one.start(arms_of(two))
    pool.wait_for_builds()
    assert waits["1b-torchao-rowwise"] < waits["1b-torchao-tensorwise"] == BUILD_SECONDS
    pool.close()


def test_a_process_that_cannot_be_started_ahead_stops_no_other_test(world, monkeypatch):
    pool = ArmPool(H200)
    one, two = pairs(pool, "1b", *RECIPES[:2])
    one.start(timed=True)

    def fail(self, spec):
        raise ArmError(R.ARM_DIED, "no process")

    monkeypatch.setattr(FakeProcess, "start_build", fail)
    alive = sum(process.alive for process in world.processes)
    one.start(arms_of(two))
    assert started(world) == ["1b-bf16", "1b-torchao-tensorwise"]
    assert sum(process.alive for process in world.processes) == alive, "the one that was asked was closed"
    pool.close()


def test_an_arm_of_which_the_next_pair_has_no_use_ends(world):
    pool = ArmPool(H200)
    one, two, three = pairs(pool, "1b", *RECIPES)
    one.start(arms_of(two))
    assert "1b-torchao-rowwise" in started(world)
    three.start()
    assert started(world) == ["1b-bf16", "1b-torchao-rowwise_with_gw_hp"]
    pool.close()


def test_a_process_with_its_imports_done_waits_for_the_next_pair_and_for_no_build_ahead(world):
    pool = ArmPool(H200)
    one, two, three = pairs(pool, "1b", *RECIPES)
    one.start(then=arms_of(two), timed=True)
    spares = {process.pid for process in world.processes if process.spec is None}
    assert spares
    one.start(arms_of(three), arms_of(two))
    assert "1b-torchao-rowwise_with_gw_hp" in started(world)
    assert {process.pid for process in world.processes if process.alive and process.spec is None} == spares
    two.start(arms_of(three))
    assert any(process.pid in spares for process in world.processes if process.spec and process.alive)
    pool.close()


def test_an_arm_that_was_built_ahead_and_closed_is_begun_again(world):
    pool = ArmPool(H200)
    one, two = pairs(pool, "1b", *RECIPES[:2])
    one.start(arms_of(two))
    pool.wait_for_builds()
    pool.close_all()
    one.start(arms_of(two))
    assert "1b-torchao-rowwise" in started(world)
    one.start()
    one.start(arms_of(two))
    assert started(world).count("1b-torchao-rowwise") == 1, "also where its build was ended"
    pool.close()


def test_waits_for_builds_that_hang_end_together(world, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("pytest_fp8.arms.meanwhile.time.monotonic", lambda: now[0])
    receive = FakeProcess.receive

    def hangs(self, timeout=0):
        if self.spec.case.recipe.startswith("rowwise"):
            now[0] += timeout
            raise ArmError(R.ARM_HUNG, "no answer")
        return {**receive(self, timeout), "memory": {"peak": 13 * GIB, "allocated": 7 * GIB}}

    monkeypatch.setattr(FakeProcess, "receive", hangs)
    pool = ArmPool(H200)
    one, two, three = pairs(pool, "1b", *RECIPES)
    one.start(arms_of(two, three), timed=True)
    one.start(arms_of(two, three))
    assert len(started(world)) == 4
    pool.wait_for_builds()
    assert now[0] < PATIENCE_SECONDS + 5
    assert started(world) == ["1b-bf16", "1b-torchao-tensorwise"]
    pool.close()


def test_an_interrupt_while_a_build_is_waited_for_leaves_no_process(world, monkeypatch):
    pool = ArmPool(H200)
    one, two = pairs(pool, "1b", *RECIPES[:2])
    one.start(arms_of(two))
    receive = FakeProcess.receive

    def interrupted(self, timeout=0):
        if self.spec.case.id == "1b-torchao-rowwise":
            # As the real one does.
            self.close()
            raise KeyboardInterrupt
        return receive(self, timeout)

    monkeypatch.setattr(FakeProcess, "receive", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pool.wait_for_builds()
    pool.close()
    assert not [process for process in world.processes if process.alive]
