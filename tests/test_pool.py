"""Which arms are alive when: what fits together stays, what does not gives way. Arms are fakes."""

from __future__ import annotations

import pytest

from helpers.fakes import H100, H200, FakeProcess, install
from pytest_fp8 import ArmError, Case
from pytest_fp8.arms.pair import PairArms, make_arm
from pytest_fp8.arms.pool import ArmPool
from pytest_fp8.questions.checkpoints.carry import transfers_of
from pytest_fp8.questions.layers.evidence import reference_layers
from pytest_fp8.questions.loss.evidence import loss_looks
from pytest_fp8.questions.memory import memory_of
from pytest_fp8.questions.speed.evidence import timing_of
from pytest_fp8.questions.speed.timing import BlockTimer

GIB = 2**30
RECIPES = ("tensorwise", "rowwise")


@pytest.fixture
def world(monkeypatch):
    return install(monkeypatch, H200)


def pairs(pool, model, *recipes):
    return [PairArms(Case(model, "torchao", recipe), pool, None) for recipe in recipes]


TE = ("transformer_engine", "current")


def built(world):
    """The live processes that are arms."""
    return [process for process in world.processes if process.alive and process.spec is not None]


def spares(world):
    """The live processes that were started ahead and are no arm yet."""
    return [process for process in world.processes if process.alive and process.spec is None]


def ahead(pool, later):
    return [make_arm(pair.case, pool, None, "") for pair in later]


def test_a_large_arm_makes_room_for_the_next(world):
    pool = ArmPool(H200)
    one, two = pairs(pool, "8b", "tensorwise", "rowwise")
    one.start(ahead(pool, [two]), ahead(pool, [two]))
    assert world.built == ["8b-bf16", "8b-torchao-tensorwise"]
    two.start()
    assert world.built == ["8b-bf16", "8b-torchao-tensorwise", "8b-torchao-rowwise"], "the reference stays"
    assert len(built(world)) == 2
    pool.close()
    assert world.closed >= 3


@pytest.mark.parametrize(
    ("case", "gpu", "together"),
    [
        (Case("8b", "torchao", "tensorwise", lora=16), H200, True),
        (Case("8b", "torchao", "tensorwise", lora=16), H100, False),
        (Case("3b", "torchao", "tensorwise"), H200, True),
        (Case("8b", "torchao", "tensorwise"), H200, False),
    ],
)
def test_large_arms_warm_up_together_where_two_steps_fit_the_gpu(world, monkeypatch, case, gpu, together):
    order: list[str] = []

    def note(what):
        real = getattr(FakeProcess, what)
        monkeypatch.setattr(FakeProcess, what, lambda self, *rest: order.append(what) or real(self, *rest))

    note("start_build")
    note("receive")
    pool = ArmPool(gpu)
    PairArms(case, pool, None).start()
    one_by_one = ["start_build", "receive"] * 2
    assert order == (sorted(one_by_one, reverse=True) if together else one_by_one)
    pool.close()


def test_arms_that_do_not_fit_together_take_turns(world, monkeypatch):
    # The second arm finds no memory as long as the first is alive.
    alive: list[FakeProcess] = []
    receive, close = FakeProcess.receive, FakeProcess.close

    def crowded(self, timeout=0):
        if any(other is not self for other in alive):
            raise ArmError("out of memory", "no room")
        alive.append(self)
        return receive(self, timeout)

    def leave(self):
        if self in alive:
            alive.remove(self)
        close(self)

    monkeypatch.setattr(FakeProcess, "receive", crowded)
    monkeypatch.setattr(FakeProcess, "close", leave)
    pool = ArmPool(H200)
    [pair] = pairs(pool, "8b", "tensorwise")
    pair.start()
    assert pool.takes_turns(pair.fp8)
    assert world.built == ["8b-bf16"], "what was built stays"
    timer = BlockTimer(pair)
    timing = timing_of(pair, timer, 0)
    assert [len(timing.bf16[0]), len(timing.fp8[0])] == [12, 12]
    assert len(timer.beside.states) == 3, "after each half of the reference's blocks, and after all of FP8's"
    assert len(alive) == 1
    assert world.built[:3] == ["8b-bf16", "8b-torchao-tensorwise", "8b-bf16"]
    pool.close()
    assert not alive


def test_the_gpu_is_looked_at_once_per_abba_block(world):
    pool = ArmPool(H200)
    [pair] = pairs(pool, "1b", "tensorwise")
    pair.start()
    timer = BlockTimer(pair)
    timing = timing_of(pair, timer, 0)
    assert len(timing.fp8[0]) == 2 * len(timer.beside.states) == 12
    pool.close()


def test_what_was_learned_of_a_reference_is_asked_once(world):
    pool = ArmPool(H200)
    one, two = pairs(pool, "1b", "tensorwise", "rowwise")
    for pair in (one, two):
        pair.start()
    assert reference_layers(one) is reference_layers(two)
    assert memory_of(one).bf16 is memory_of(two).bf16
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
        transfers_of(pair)
    assert len(saved) == len(set(saved)) == 3, "safetensors and DCP once, safetensors alone once"
    pool.close()


def test_bf16_against_bf16_is_two_processes(world):
    pool = ArmPool(H200)
    null = PairArms(Case("1b", "bf16", "none"), pool, None)
    null.start()
    assert len(built(world)) == 2
    pool.close()


@pytest.mark.parametrize(("peak", "tight"), [(60 * GIB, False), (75 * GIB, True)])
def test_tight_arms_are_those_whose_peaks_do_not_fit(world, monkeypatch, peak, tight):
    facts = {"memory": {"peak": peak, "allocated": 45 * GIB}}
    monkeypatch.setattr(FakeProcess, "receive", lambda self, timeout=0: facts)
    pool = ArmPool(H200)
    [pair] = pairs(pool, "8b", "tensorwise")
    pair.start()
    assert pool.tight(pair.fp8, pair.bf16) is tight
    pool.close()


@pytest.mark.parametrize(("gpu", "at_once"), [(H200, True), (H100, False)])
def test_steps_that_are_looked_at_go_together_only_where_both_fit(world, monkeypatch, gpu, at_once):
    """1B in Transformer Engine: both steps fit 80 GB, and not both as they are looked at."""
    facts = {"memory": {"peak": 28 * GIB, "allocated": 7 * GIB}}
    monkeypatch.setattr(FakeProcess, "receive", lambda self, timeout=0: facts)
    pool = ArmPool(gpu)
    [pair] = pairs(pool, "1b", "tensorwise")
    pair.start()
    assert not pool.tight(pair.fp8, pair.bf16)
    assert pool.side_by_side(pair.fp8, pair.bf16) is at_once
    pool.close()


def test_a_process_that_was_started_ahead_is_no_stranger(world):
    pool = ArmPool(H200)
    one, two = pairs(pool, "8b", "tensorwise", "rowwise")
    one.start(ahead(pool, [two]), ahead(pool, [two]))
    waiting = {process.pid for process in spares(world)}
    assert waiting
    assert waiting < pool.pids
    pool.close()


EMULATED = Case("tiny", "torchao", "tensorwise", emulated=True)


@pytest.fixture
def told(monkeypatch):
    """What arms were asked to and answered, in order: each beginning and each end of a curve."""
    seen: list[str] = []
    send, curve = FakeProcess.send, FakeProcess.curve

    def note_send(self, operation, **arguments):
        seen.append(f"{self.spec.case.backend} begins")
        send(self, operation, **arguments)

    def note_curve(self, *arguments, **named):
        seen.append(self.spec.case.backend)
        return curve(self, *arguments, **named)

    monkeypatch.setattr(FakeProcess, "send", note_send)
    monkeypatch.setattr(FakeProcess, "curve", note_curve)
    return seen


def test_on_a_cpu_the_reference_trains_while_the_fp8_arm_does(world, told):
    pool = ArmPool(None)
    pair = PairArms(EMULATED, pool, None)
    evidence = next(loss_looks(pair, twin=True))
    assert told[:4] == ["torchao begins", "bf16", "bf16", "torchao"], "curve and twin, before FP8's answer is awaited"
    assert evidence.fp8.keys() == evidence.bf16.keys() == evidence.twin.keys()
    assert evidence.fp8[0].losses != evidence.bf16[0].losses != evidence.twin[0].losses
    pool.close()


def test_arms_that_fit_a_gpu_together_train_together_and_others_one_after_the_other(world, told, monkeypatch):
    pool = ArmPool(H200)
    [pair] = pairs(pool, "tiny", "tensorwise")
    next(loss_looks(pair, twin=True))
    assert told[:4] == ["torchao begins", "bf16", "bf16", "torchao"]
    told.clear()
    monkeypatch.setattr(ArmPool, "tight", lambda *_, **__: True)
    [another] = pairs(pool, "tiny", "rowwise")
    next(loss_looks(another, twin=True))
    assert told == ["torchao"] * 3, "one after the other; the reference's curves are known"
    pool.close()


def test_one_process_is_never_asked_for_both_curves_at_once(world):
    pool = ArmPool(None)
    pair = PairArms(EMULATED, pool, None)
    assert pool.side_by_side(pair.fp8, pair.bf16)
    assert not pool.side_by_side(pair.fp8, pair.fp8)
    pool.close()


def test_an_answer_that_nobody_fetches_goes_with_its_process(world, monkeypatch):
    curve = FakeProcess.curve

    def fail(self, *arguments, **named):
        if not self.is_fp8:
            raise ArmError("raised", "the reference failed")
        return curve(self, *arguments, **named)

    monkeypatch.setattr(FakeProcess, "curve", fail)
    pool = ArmPool(None)
    pair = PairArms(EMULATED, pool, None)
    pair.start()
    before = pool.live(pair.fp8)
    with pytest.raises(ArmError, match="the reference failed"):
        next(loss_looks(pair, twin=True))
    assert not before.alive
    assert pair.fp8.request("logits", seed=0), "a fresh process answers"
    pool.close()


def test_a_process_that_ended_while_it_waited_is_passed_over(world):
    pool = ArmPool(H200)
    one, two = pairs(pool, "8b", "tensorwise", "rowwise")
    one.start(ahead(pool, [two]), ahead(pool, [two]))
    [spare] = [process for process in spares(world) if process.backend == "torchao"]
    spare.alive = False
    two.start()
    assert spare.spec is None, "it became no arm"
    assert len(built(world)) == 2
    pool.close()


@pytest.fixture
def ranks(world, monkeypatch):
    """The processes of arms on several GPUs that were started, one for all ranks of an arm."""
    started = []

    def ranked(count, backend, *more):
        started.append(FakeProcess(backend, *more[:2]))
        return started[-1]

    monkeypatch.setattr("pytest_fp8.arms.pool.RankedProcess", ranked)
    return started


def test_ranks_wait_for_a_case_of_several_gpus_and_for_no_other(world, ranks):
    pool = ArmPool(H200)
    two_gpus = PairArms(Case("8b", "torchao", "rowwise", batch=4, gpus=2, parallel="fsdp2"), pool, None)
    [one] = pairs(pool, "8b", "tensorwise")
    one.start(then=ahead(pool, [two_gpus]))
    waiting = [process for process in spares(world) if process in ranks]
    assert [process.backend for process in waiting] == ["torchao"]
    assert {process.pid for process in waiting} <= pool.pids
    two_gpus.start()
    assert waiting[0].spec.case == two_gpus.fp8.spec.case
    pool.close()


def test_no_more_ranks_wait_than_two_arms_have(world, ranks):
    pool = ArmPool(H200)
    how = {"batch": 8, "gpus": 8, "parallel": "fsdp2"}
    one, then = (PairArms(Case("8b16", b, r, **how), pool, None) for b, r in (("torchao", "rowwise"), TE))
    one.start(then=[then.bf16, then.fp8])
    waiting = [process.backend for process in spares(world) if process in ranks]
    assert waiting == ["bf16", "transformer_engine"]
    pool.close()
    assert not spares(world)


def test_what_waits_for_arms_that_do_not_come_ends(world):
    pool = ArmPool(H200)
    one, two = pairs(pool, "8b", "tensorwise", "rowwise")
    te = PairArms(Case("8b", "transformer_engine", "current"), pool, None)
    one.start(then=ahead(pool, [te]))
    waiting = [process for process in spares(world) if process.backend == "transformer_engine"]
    assert len(waiting) == 1
    pool.close_all()
    two.start()
    assert not waiting[0].alive
    pool.close()


def test_no_process_waits_for_a_case_on_the_cpu(world):
    pool = ArmPool(None)
    pair, later = (PairArms(Case("tiny", "torchao", recipe, emulated=True), pool, None) for recipe in RECIPES)
    pair.start(ahead(pool, [later]), ahead(pool, [later]))
    assert not spares(world)
    pool.close()
