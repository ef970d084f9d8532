"""Arms of later cases are built ahead where there is room, by what is estimated and by what arms said."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers.fakes import H100, H200, FakeProcess, install
from helpers.later_arms import GIB, RECIPES, arms_of, facts, pairs, started
from pytest_fp8 import ArmError, Case
from pytest_fp8.arms.arm import Arm
from pytest_fp8.arms.memory_plan import peak_bytes
from pytest_fp8.arms.pair import PairArms
from pytest_fp8.arms.pool import ArmPool
from pytest_fp8.arms.room import Room
from pytest_fp8.arms.spec import ArmSpec
from pytest_fp8.codes import R


@pytest.fixture
def world(monkeypatch):
    return install(monkeypatch, H200)


@pytest.mark.parametrize("gpu", [H100, H200])
def test_no_more_arms_begin_than_fit(world, gpu):
    pool = ArmPool(gpu)
    [first, *later] = pairs(pool, "1b", *RECIPES)
    later += [PairArms(Case("1b", "transformer_engine", r), pool, None) for r in ("delayed", "current", "block")]
    first.start(arms_of(*later))
    assert sum(peak_bytes(process.spec.case) for process in world.processes if process.spec) < gpu.memory
    assert len(started(world)) < 2 + len(later)
    pool.close()


@pytest.mark.parametrize(("peak", "begins"), [(13, True), (26, False)])
def test_what_the_reference_took_tells_what_a_later_arm_takes(world, monkeypatch, peak, begins):
    facts(monkeypatch, peak=peak, allocated=7)
    pool = ArmPool(H100)
    one, two = pairs(pool, "1b", *RECIPES[:2])
    one.start(arms_of(two), timed=True)
    one.start(arms_of(two))
    assert (started(world)[2:] == ["1b-torchao-rowwise"]) is begins
    pool.close()


def room(**gib):
    """An H100 with arms of these keys that said so: (peak, resident between steps)."""
    said = {key: {"memory": {"peak": peak * GIB, "allocated": held * GIB}} for key, (peak, held) in gib.items()}
    return Room(H100, said)


def arm_of(key, case):
    return Arm(key, ArmSpec(case, "cuda"), pool=None)


def test_what_others_hold_and_what_a_backend_takes_more_than_bf16_count():
    case = Case("1b", "torchao", "tensorwise")
    te = arm_of("te", Case("1b", "transformer_engine", "delayed"))
    torchao = arm_of("torchao", replace(case, recipe="rowwise"))
    reference, mine = arm_of("bf16", case.reference()), arm_of("mine", case)
    pair = [reference, mine]
    at = {"bf16": (19, 7), "mine": (19, 7), "other": (19, 7), case.reference().digest(): (19, 7)}
    assert room(**at).fits(torchao, pair, [], [])
    assert not room(**at).fits(torchao, pair, ["other"], [])
    assert not room(**at).fits(torchao, pair, [], [arm_of("another", case)])
    smaller = dict.fromkeys(at, (18, 7))
    assert room(**smaller).fits(torchao, pair, ["other"], [])
    assert not room(**smaller).fits(te, pair, ["other"], [])
    assert room(**at).holds(pair, ["other"], [torchao])
    assert not room(**at).holds(pair, ["other"], [torchao, te])


def test_on_80_gb_an_arm_of_1b_is_built_while_a_pair_answers(world, monkeypatch):
    """As an H100 said: 20.5 GiB at the peak of a BF16 step and 7 between steps."""
    facts(monkeypatch, peak=20.5, allocated=7)
    pool = ArmPool(H100)
    one, two, three = pairs(pool, "1b", *RECIPES)
    one.start(arms_of(two, three), timed=True)
    one.start(arms_of(two, three))
    assert started(world)[2:] == ["1b-torchao-rowwise"]
    pool.close()


def test_an_arm_that_is_being_built_takes_room_from_steps_that_are_looked_at(world, monkeypatch):
    facts(monkeypatch, peak=14, allocated=7)
    pool = ArmPool(H100)
    one, two = pairs(pool, "1b", *RECIPES[:2])
    one.start(arms_of(two), timed=True)
    assert pool.side_by_side(one.fp8, one.bf16)
    one.start(arms_of(two))
    assert not pool.side_by_side(one.fp8, one.bf16)
    assert not pool.tight(one.fp8, one.bf16)
    pool.close()


@pytest.mark.parametrize(("always", "turns"), [(False, False), (True, True)])
def test_a_pair_without_memory_is_built_once_more_without_what_was_built_ahead(world, monkeypatch, always, turns):
    receive = FakeProcess.receive

    def crowded(self, timeout=0):
        others = [each for each in world.processes if each.alive and each.spec and each is not self]
        if self.spec.case.recipe == "rowwise" and (always or len(others) > 1):
            raise ArmError(R.OUT_OF_MEMORY, "no room")
        return receive(self, timeout)

    monkeypatch.setattr(FakeProcess, "receive", crowded)
    pool = ArmPool(H200)
    one, two, three = pairs(pool, "1b", *RECIPES)
    one.start(arms_of(three), timed=True)
    one.start(arms_of(three))
    two.start(arms_of(three))
    assert pool.takes_turns(two.fp8) is turns
    assert started(world)[0] == "1b-bf16", "what was built stays"
    pool.close()


def test_what_is_not_compiled_is_expected_to_take_more_than_a_compiled_reference(world, monkeypatch):
    facts(monkeypatch, peak=19, allocated=7)
    pool = ArmPool(H100)
    one, two = pairs(pool, "1b", *RECIPES[:2])
    eager = PairArms(Case("1b", "torchao", "rowwise", compile=False), pool, None)
    one.start(timed=True)
    one.start(arms_of(eager))
    assert started(world) == ["1b-bf16", "1b-torchao-tensorwise"]
    one.start(arms_of(two))
    assert started(world)[2:] == ["1b-torchao-rowwise"]
    pool.close()


def test_not_more_than_five_builds_are_under_way(world, monkeypatch):
    monkeypatch.setattr(FakeProcess, "has_answered", False)
    pool = ArmPool(H200)
    [first, *later] = pairs(pool, "tiny", *RECIPES)
    later += [PairArms(Case("tiny", "transformer_engine", r), pool, None) for r in ("delayed", "current", "block")]
    first.start(arms_of(*later, *pairs(pool, "1b", "tensorwise")))
    assert len(started(world)) == 2 + 5
    pool.close()
    assert not started(world)
