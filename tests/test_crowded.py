"""Arms that were built together and do not fit the GPU together after all: they take turns, and nothing is lost."""

from __future__ import annotations

import pytest

from helpers.fakes import H100, H200, FakeProcess, install, timed
from pytest_fp8 import ArmError, Case
from pytest_fp8.arms.arm import Arm
from pytest_fp8.arms.pair import PairArms
from pytest_fp8.arms.pool import ArmPool
from pytest_fp8.arms.room import Room
from pytest_fp8.arms.spec import ArmSpec
from pytest_fp8.questions.layers.evidence import fp8_layers, reference_layers
from pytest_fp8.questions.numerics.evidence import numerics_of
from pytest_fp8.questions.speed.evidence import timing_of
from pytest_fp8.questions.speed.timing import BlockTimer

GIB = 2**30
CASE = Case("8b16", "torchao", "tensorwise", batch=4, gpus=2, parallel="fsdp2")


@pytest.fixture
def world(monkeypatch):
    world = install(monkeypatch, H200)
    monkeypatch.setattr("pytest_fp8.arms.pool.RankedProcess", lambda ranks, *how: FakeProcess(*how[:3]))
    return world


def alive(world):
    return [process for process in world.processes if process.alive and process.spec is not None]


@pytest.fixture
def pair(world):
    pool = ArmPool(H200)
    pair = PairArms(Case("8b", "torchao", "tensorwise"), pool, None)
    pair.start()
    assert len(alive(world)) == 2
    yield pair
    pool.close()


def beside_another(monkeypatch, world, operation, fails):
    """``operation`` of an arm for which ``fails`` says so ends in this while another arm is alive."""
    real = getattr(FakeProcess, operation)

    def asked(self, **arguments):
        if len(alive(world)) > 1 and fails(self):
            return crowded(arguments)
        return real(self, **arguments)

    def crowded(arguments):
        if operation == "blocks":
            return timed([100.0] * arguments["count"], retries=7)
        raise ArmError("out of memory", "no room beside the other")

    monkeypatch.setattr(FakeProcess, operation, asked)


@pytest.mark.parametrize(
    ("what", "gpu", "peaks", "held", "others", "crowded"),
    [
        ("Accelerate's float32 weights, 16 layers of 8B", H100, (50.5, 45.0), 27.2, (), True),
        ("the same on an H200", H200, (50.5, 45.0), 27.2, (), False),
        ("plain FSDP2", H100, (38.0, 36.0), 25.2, (), False),
        ("and a third arm", H100, (38.0, 36.0), 25.2, ("other",), True),
        ("the larger one is the FP8 arm", H100, (45.0, 50.5), 27.2, (), True),
    ],
)
def test_a_step_must_fit_beside_what_the_other_arm_holds(what, gpu, peaks, held, others, crowded):
    keys = ("bf16", "fp8", "other")
    said = {
        key: {"memory": {"peak": size * GIB, "allocated": held * GIB}}
        for key, size in zip(keys, (*peaks, 1), strict=True)
    }
    arms = [Arm(key, ArmSpec(CASE, "cuda"), pool=None) for key in keys[:2]]
    assert Room(gpu, said).crowded(arms, others) is crowded, what


def test_a_cpu_and_arms_that_said_nothing_are_not_crowded():
    arms = [Arm(key, ArmSpec(CASE, "cuda"), pool=None) for key in ("bf16", "fp8")]
    assert not Room(None, {}).crowded(arms, ())
    assert not Room(H100, {}).crowded(arms, ())


def test_a_pair_whose_build_says_that_it_is_crowded_takes_turns_and_keeps_the_reference(world, monkeypatch):
    receive = FakeProcess.receive
    memory = {"peak": 90 * GIB, "allocated": 50 * GIB}
    monkeypatch.setattr(FakeProcess, "receive", lambda self, timeout=0: {**receive(self, timeout), "memory": memory})
    pool = ArmPool(H200)
    pair = PairArms(CASE, pool, None)
    pair.start()
    assert pool.takes_turns(pair.fp8)
    assert [process.spec.case.id for process in alive(world)] == [CASE.reference().id]
    built = list(world.built)
    pair.start()
    assert world.built == built, "known from now on"
    pool.close()


def test_blocks_in_which_memory_ran_out_are_taken_again_by_turns(pair, world, monkeypatch):
    beside_another(monkeypatch, world, "blocks", lambda process: not process.is_fp8)
    timer = BlockTimer(pair)
    timing = timing_of(pair, timer, 0)
    assert pair.takes_turns
    assert [len(timing.bf16[0]), len(timing.fp8[0])] == [12, 12]
    assert 100.0 not in timing.bf16[0]
    assert [turn.arm for turn in timing.turns] == ["BF16", "FP8", "BF16"], "none of the first attempt's"
    assert len(timer.beside.states) == 3


def test_memory_that_runs_out_in_turns_is_the_models_own(pair, world, monkeypatch):
    monkeypatch.setattr(FakeProcess, "blocks", lambda self, count, steps, dropped: timed([100.0] * count, retries=1))
    timing = timing_of(pair, BlockTimer(pair), 0)
    assert pair.takes_turns
    assert {turn.retries for turn in timing.turns} == {1}, "told in the recording"


@pytest.mark.parametrize("who", ["bf16", "torchao"])
def test_a_question_without_room_is_asked_once_more_by_turns(pair, world, monkeypatch, who):
    beside_another(monkeypatch, world, "numerics", lambda process: process.spec.case.backend == who)
    first = alive(world)
    assert numerics_of(pair).fp8 is not None
    assert pair.takes_turns
    assert not any(process.alive for process in first), "an arm that broke off in a step is not asked again"
    assert len(alive(world)) == 1


def test_what_was_answered_before_stays(pair, world, monkeypatch):
    timing_of(pair, BlockTimer(pair), 0)
    before = fp8_layers(pair), reference_layers(pair)
    beside_another(monkeypatch, world, "numerics", lambda process: True)
    numerics_of(pair)
    monkeypatch.setattr(FakeProcess, "layers", None)
    assert (fp8_layers(pair), reference_layers(pair)) == before


def test_memory_that_runs_out_for_an_arm_alone_ends_the_question(pair, world, monkeypatch):
    def asked(self, **arguments):
        raise ArmError("out of memory", "no room at all")

    monkeypatch.setattr(FakeProcess, "numerics", asked)
    with pytest.raises(ArmError, match="no room at all"):
        numerics_of(pair)
    assert pair.takes_turns
    built = len(world.built)
    with pytest.raises(ArmError, match="no room at all"):
        numerics_of(pair)
    assert len(world.built) <= built + 2


@pytest.mark.parametrize("kind", ["raised", "died", "hung"])
def test_no_other_error_is_asked_again(pair, world, monkeypatch, kind):
    asked = []

    def fails(self, **arguments):
        asked.append(self)
        raise ArmError(kind, "something else")

    monkeypatch.setattr(FakeProcess, "numerics", fails)
    with pytest.raises(ArmError, match="something else"):
        numerics_of(pair)
    assert not pair.takes_turns
    assert len(asked) == 1


def test_on_a_cpu_nothing_takes_turns(world, monkeypatch):
    pool = ArmPool(None)
    pair = PairArms(Case("micro", "torchao", "tensorwise", emulated=True), pool, None)
    pair.start()
    beside_another(monkeypatch, world, "numerics", lambda process: True)
    with pytest.raises(ArmError, match="no room"):
        numerics_of(pair)
    assert not pair.takes_turns
    pool.close()


SUITE = """
    import pytest
    from pytest_fp8 import Case

    pytestmark = pytest.mark.fp8(cases=[Case("1b", "torchao", "tensorwise")])

    def test_layers(fp8_pair):
        fp8_pair.assert_layers()

    def test_numerics(fp8_pair):
        fp8_pair.assert_numerics()

    def test_speedup(fp8_pair):
        fp8_pair.assert_faster()
"""


def test_a_session_whose_arms_turn_out_crowded_answers_all_the_same(pytester, monkeypatch):
    world = install(monkeypatch, H200)
    pytester.makepyfile(SUITE)
    beside_another(monkeypatch, world, "numerics", lambda process: process.is_fp8)
    result = pytester.runpytest("--fp8-gpu=h200")
    result.assert_outcomes(passed=3)
    assert not alive(world)
