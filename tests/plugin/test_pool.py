"""The pool that keeps arms and the loop that asks them: which are alive when, what is asked of which, when both work at
once, errors, interrupts, and what is kept. Arms are fakes."""

from __future__ import annotations

from contextlib import ExitStack, closing
from functools import partial
from types import SimpleNamespace

import pytest

from helpers.fakes import GIB, H100, H200, FakeProcess, built, install, pairs, spares
from pytest_fp8 import ArmError, Case
from pytest_fp8.arms.pair import PairArms
from pytest_fp8.arms.pool import ArmPool
from pytest_fp8.codes import R
from pytest_fp8.plan import FP8, REFERENCE, Ask
from pytest_fp8.questions.checkpoints.carry import transfers_of
from pytest_fp8.questions.loss.check import loss_of


@pytest.fixture
def world(monkeypatch):
    return install(monkeypatch, H200)


@pytest.fixture
def pool_on(world):
    """``pool_on(gpu, cases)``: a pool, which is closed at the end."""
    with ExitStack() as ends:
        yield lambda *given: ends.enter_context(closing(ArmPool(*given)))


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


def of_a_workload(pool, model="own"):
    return PairArms(Case(model, "torchao", "tensorwise"), pool, "a workload", "its identity")


# -- which are alive --------------------------------------------------------------------------------------------------


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
def test_both_arms_are_built_at_once(pool_on, model, order):
    of_a_workload(pool_on(H200), model).start()
    assert order.what == ["start", "start", "receive", "receive"]


@pytest.mark.parametrize("beside", [True, False], ids=["fits once it has warmed up", "never fits"])
def test_arms_without_room_for_two_steps_are_built_one_by_one_and_then_by_turns(pool_on, world, monkeypatch, beside):
    receive = FakeProcess.receive
    warm: list[FakeProcess] = []

    def cold(self, timeout=0):
        others = [each for each in world.processes if each.alive and each.spec and each is not self]
        if any(each not in warm for each in others) or (others and not beside):
            raise ArmError(R.OUT_OF_MEMORY, "two steps at once")
        warm.append(self)
        return receive(self, timeout)

    monkeypatch.setattr(FakeProcess, "receive", cold)
    pair = of_a_workload(pool_on(H100))
    pair.start()
    assert pair.takes_turns is not beside
    assert {each.spec.case.id for each in built(world)} == {*["own-bf16", "own-torchao-tensorwise"][: 1 + beside]}


def test_peaks_that_were_too_large_at_once_are_not_tried_at_once_again(pool_on, order):
    """A fresh pair of processes is built for each further look at the times."""
    order.facts = {"memory": {"peak": 50 * GIB, "allocated": 20 * GIB}}
    pair = of_a_workload(pool_on(H100))
    pair.start()
    order.what.clear()
    pair.renew()
    assert order.what == ["start", "receive"] * 2


@pytest.mark.parametrize(("peak", "tight"), [(60 * GIB, False), (75 * GIB, True)])
def test_tight_arms_are_those_whose_peaks_do_not_fit(pool_on, order, peak, tight):
    order.facts = {"memory": {"peak": peak, "allocated": 45 * GIB}}
    [pair] = pairs(pool_on(H200), "8b", "tensorwise")
    pair.start()
    assert pair.tight is tight


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


def test_what_a_shared_reference_saves_for_one_case_is_not_overwritten_for_another(pool_on, monkeypatch):
    # Seen on an H200: a case without the optimizer saved into the folder that a case with it went on to load from.
    saved: list[str] = []
    save = FakeProcess.save

    def remember(self, folder, store, optimizer):
        if not self.is_fp8:
            saved.append(folder)
        return save(self, folder, store, optimizer)

    monkeypatch.setattr(FakeProcess, "save", remember)
    pool = pool_on(H200)
    alone = Case("1b", "torchao", "rowwise", checkpoint_formats=("safetensors",), resume=False)
    cases = [Case("1b", "torchao", "tensorwise"), alone, Case("1b", "transformer_engine", "delayed")]
    for pair in [PairArms(case, pool, None) for case in cases]:
        pair.start()
        pair.run(partial(transfers_of, pair))
    assert len(saved) == len(set(saved)) == 3, "safetensors and DCP once, safetensors alone once"


# -- both at work -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpu", [H200, None])
def test_steps_that_are_recorded_go_together_on_a_cpu_alone(pool_on, monkeypatch, gpu):
    def recorded():
        yield Ask(REFERENCE, "numerics", moved=True), Ask(FP8, "numerics", moved=False)

    sent = []
    send = FakeProcess.send
    monkeypatch.setattr(FakeProcess, "send", lambda self, *a, **b: sent.append(self) or send(self, *a, **b))
    [pair] = pairs(pool_on(gpu), "own", "tensorwise")
    pair.start()
    pair.run(recorded)
    assert bool(sent) is (gpu is None)


def test_arms_that_fit_a_gpu_together_train_together_and_others_one_after_the_other(pool_on, monkeypatch):
    told: list[str] = []  # each beginning and each end of a curve
    send, curve = FakeProcess.send, FakeProcess.curve

    def note_send(self, operation, **arguments):
        told.append(f"{self.spec.case.backend} begins")
        send(self, operation, **arguments)

    def note_curve(self, *arguments, **named):
        told.append(self.spec.case.backend)
        return curve(self, *arguments, **named)

    monkeypatch.setattr(FakeProcess, "send", note_send)
    monkeypatch.setattr(FakeProcess, "curve", note_curve)
    pair, another = pairs(pool_on(H200), "tiny", "tensorwise", "rowwise")
    pair.start()
    pair.run(lambda: loss_of(pair, True))
    assert told[:6] == ["torchao begins", "bf16", "torchao"] * 2
    told.clear()
    monkeypatch.setattr(ArmPool, "tight", lambda *_, **__: True)
    another.start()
    another.run(lambda: loss_of(another, True))
    assert told == ["torchao"] * 3, "one after the other; the reference's curves are known"


def test_an_answer_that_nobody_fetches_goes_with_its_process(pool_on, monkeypatch):
    curve = FakeProcess.curve

    def fail(self, *arguments, **named):
        if not self.is_fp8:
            raise ArmError(R.ARM_RAISED, "the reference failed")
        return curve(self, *arguments, **named)

    monkeypatch.setattr(FakeProcess, "curve", fail)
    pair = PairArms(Case("tiny", "torchao", "tensorwise", emulated=True), pool_on(None), None)
    pair.start()
    before = pair.pool.live(pair.fp8)
    with pytest.raises(ArmError, match="the reference failed"):
        pair.run(lambda: loss_of(pair, True))
    assert not before.alive
    assert pair.fp8.request("logits", seed=0), "a fresh process answers"


# -- by turns ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def pair(world, pool_on):
    """Its arms take turns; the reference is alive."""
    world.gpu = H100
    [pair] = pairs(pool_on(H100), "8b", "tensorwise")
    pair.start()
    assert pair.takes_turns
    return pair


def asked(world):
    """What was asked of which arm, in order."""
    return [(FP8 if process.is_fp8 else REFERENCE, operation) for process, operation, _ in world.asked]


def both(operation):
    def question():
        return (yield Ask(REFERENCE, operation, seed=0, fresh=True), Ask(FP8, operation, seed=0, fresh=True))

    return question


def test_an_arm_answers_all_it_can_before_the_other_is_built_and_what_belongs_together_is_not_parted(pair, world):
    chained = [(REFERENCE, "restart"), (REFERENCE, "logits"), (REFERENCE, "restart"), (FP8, "logits")]

    def chain():
        for arm, operation in chained:
            yield Ask(arm, operation, fresh=True, seed=0)

    assert pair.gather({"chain": chain, "other": both("restart")}) == {}
    assert asked(world) == [*chained[:3], (REFERENCE, "restart"), chained[3], (FP8, "restart")]


def test_an_answer_is_kept_for_whoever_asks_the_same_and_a_fresh_one_is_not(pair, world):
    def kept():
        return (yield Ask(REFERENCE, "logits", seed=0)), (yield Ask(REFERENCE, "logits", seed=1))

    one, two = pair.run(kept), pair.run(kept)
    assert one == two
    assert pair.known(kept) == one
    assert asked(world) == [(REFERENCE, "logits")] * 2
    pair.run(both("restart"))
    assert pair.known(both("restart")) is None
    assert len(asked(world)) == 4


def test_an_error_is_its_own_questions_and_is_raised_where_it_asked(pair):
    tries = []

    def repeats():
        try:
            yield Ask(FP8, "no_such_operation", fresh=True)
        except AttributeError as error:
            tries.append(error)
        yield Ask(FP8, "logits", fresh=True, seed=0)
        raise ArmError(R.ARM_RAISED, "in the end")

    errors = pair.gather({"one": repeats, "two": both("logits")})
    assert {name: error.headline for name, error in errors.items()} == {"one": "in the end"}
    assert len(tries) == 1


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_ends_all_questions(pair, monkeypatch, stop):
    ended = []

    def waits():
        try:
            yield Ask(REFERENCE, "logits", fresh=True, seed=0)
            yield Ask(FP8, "logits", fresh=True, seed=0)
        finally:
            ended.append("one")

    def interrupt(*_, **__):
        raise stop

    monkeypatch.setattr(FakeProcess, "restart", interrupt)
    with pytest.raises(stop):
        pair.gather({"one": waits, "two": both("restart")})
    assert ended == ["one"]
    assert pair.gather({"again": both("logits")}) == {}, "the pair can be asked again"
