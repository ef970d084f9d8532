"""Which arms are alive when: what fits together stays, what does not gives way. Arms are fakes."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest

from helpers.fakes import GIB, H100, H200, FakeProcess, built, install, pairs, spares
from pytest_fp8 import ArmError, Case
from pytest_fp8.arms.pair import PairArms
from pytest_fp8.arms.pool import ArmPool
from pytest_fp8.codes import R
from pytest_fp8.plan import REFERENCE
from pytest_fp8.questions.asks import layers_of, memory_of
from pytest_fp8.questions.checkpoints.carry import transfers_of


@pytest.fixture
def world(monkeypatch):
    return install(monkeypatch, H200)


@pytest.fixture
def order(monkeypatch):
    """What is done with processes that are built, in its order; each says what ``done.facts`` are."""
    done = SimpleNamespace(what=[], facts={})
    start = FakeProcess.start_build

    def received(self, timeout=0):
        done.what.append("receive")
        return done.facts

    monkeypatch.setattr(FakeProcess, "start_build", lambda self, spec: done.what.append("start") or start(self, spec))
    monkeypatch.setattr(FakeProcess, "receive", received)
    return done


def test_a_large_arm_makes_room_for_the_next(world):
    pool = ArmPool(H200)
    one, two = pairs(pool, "8b", "tensorwise", "rowwise")
    one.start()
    assert world.built == ["8b-bf16", "8b-torchao-tensorwise"]
    two.start()
    assert world.built == ["8b-bf16", "8b-torchao-tensorwise", "8b-torchao-rowwise"], "the reference stays"
    assert len(built(world)) == 2
    pool.close()
    assert world.closed >= 3


@pytest.mark.parametrize("model", ["own", "tiny", "8b"])
def test_both_arms_are_built_at_once(world, model, order):
    pool = ArmPool(H200)
    PairArms(Case(model, "torchao", "tensorwise"), pool, "a workload", "its identity").start()
    assert order.what == ["start", "start", "receive", "receive"]
    pool.close()


@pytest.mark.parametrize("beside", [True, False], ids=["fits once it has warmed up", "never fits"])
def test_arms_without_room_for_two_steps_are_built_one_by_one_and_then_by_turns(world, monkeypatch, beside):
    receive = FakeProcess.receive
    warm: list[FakeProcess] = []

    def cold(self, timeout=0):
        others = [each for each in world.processes if each.alive and each.spec and each is not self]
        if any(each not in warm for each in others) or (others and not beside):
            raise ArmError(R.OUT_OF_MEMORY, "two steps at once")
        warm.append(self)
        return receive(self, timeout)

    monkeypatch.setattr(FakeProcess, "receive", cold)
    pool = ArmPool(H100)
    pair = PairArms(Case("own", "torchao", "tensorwise"), pool, "a workload", "its identity")
    pair.start()
    assert pool.takes_turns(pair.fp8) is not beside
    assert {each.spec.case.id for each in built(world)} == {*["own-bf16", "own-torchao-tensorwise"][: 1 + beside]}
    pool.close()


def test_peaks_that_were_too_large_at_once_are_not_tried_at_once_again(world, order):
    """A fresh pair of processes is built for each further look at the times."""
    order.facts = {"memory": {"peak": 50 * GIB, "allocated": 20 * GIB}}
    pool = ArmPool(H100)
    pair = PairArms(Case("own", "torchao", "tensorwise"), pool, "a workload", "its identity")
    pair.start()
    order.what.clear()
    pair.renew()
    assert order.what == ["start", "receive"] * 2
    pool.close()


def test_processes_wait_with_their_libraries_and_none_imports_beside_an_arm(world, monkeypatch):
    """Those of a pair whose speed is asked, and of the next case's arms; those of no other library. What is timed waits
    for their imports, and nothing else does."""
    real = FakeProcess.receive

    def receive(self, timeout=0):
        if not self.answer_due:
            return real(self, timeout)
        self.answer_due = False
        if self.backend == "transformer_engine":
            raise ArmError(R.ARM_DIED, "a library is missing")
        return 0.0

    monkeypatch.setattr(FakeProcess, "receive", receive)
    monkeypatch.setattr(FakeProcess, "start_import", lambda self: setattr(self, "answer_due", True))
    tiny = Case("tiny", "torchao", "tensorwise", questions=("layers", "loss"))
    one, other = Case("1b", "torchao", "tensorwise"), Case("1b", "transformer_engine", "current")
    pool = ArmPool(H200, [tiny, one, other])

    def waiting():
        return [process.backend for process in spares(world)]

    PairArms(tiny, pool, None).start()
    assert waiting() == ["bf16", "torchao"], "of the next case: nothing of this one is timed"
    pair = PairArms(one, pool, None)
    pair.start()
    assert sorted(waiting()) == ["bf16", "torchao", "transformer_engine"]
    assert {process.pid for process in spares(world)} < pool.pids
    pair.fp8.request("memory")
    assert any(process.answer_due for process in spares(world))
    pair.fp8.request("busy", steps=2)
    assert not any(process.answer_due for process in spares(world))
    assert sorted(waiting()) == ["bf16", "torchao"], "its arm says why it cannot be had"
    ahead = spares(world)
    pair.renew()
    assert all(process.spec is not None for process in ahead), "the fresh arms"
    PairArms(other, pool, None).start()
    assert sorted(waiting()) == ["bf16", "transformer_engine"]
    pool.close()
    assert not spares(world)


def test_what_was_learned_of_a_reference_is_asked_once(world):
    pool = ArmPool(H200)
    one, two = pairs(pool, "1b", "tensorwise", "rowwise")
    for pair in (one, two):
        pair.start()
    assert one.run(lambda: layers_of(REFERENCE)) is two.run(lambda: layers_of(REFERENCE))
    assert one.run(memory_of).bf16 is two.run(memory_of).bf16
    pool.close()


def test_what_a_shared_reference_saves_for_one_case_is_not_overwritten_for_another(world, monkeypatch):
    # Seen on an H200: a case without the optimizer saved into the folder that a case with it went on to load from.
    saved: list[str] = []
    save = FakeProcess.save

    def remember(self, folder, store, optimizer):
        if not self.is_fp8:
            saved.append(folder)
        return save(self, folder, store, optimizer)

    monkeypatch.setattr(FakeProcess, "save", remember)
    pool = ArmPool(H200)
    alone = Case("1b", "torchao", "rowwise", checkpoint_formats=("safetensors",), resume=False)
    cases = [Case("1b", "torchao", "tensorwise"), alone, Case("1b", "transformer_engine", "delayed")]
    for pair in [PairArms(case, pool, None) for case in cases]:
        pair.start()
        pair.run(partial(transfers_of, pair))
    assert len(saved) == len(set(saved)) == 3, "safetensors and DCP once, safetensors alone once"
    pool.close()


@pytest.mark.parametrize(("peak", "tight"), [(60 * GIB, False), (75 * GIB, True)])
def test_tight_arms_are_those_whose_peaks_do_not_fit(world, order, peak, tight):
    order.facts = {"memory": {"peak": peak, "allocated": 45 * GIB}}
    pool = ArmPool(H200)
    [pair] = pairs(pool, "8b", "tensorwise")
    pair.start()
    assert pool.tight(pair.fp8, pair.bf16) is tight
    pool.close()
