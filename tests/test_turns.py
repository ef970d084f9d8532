"""How long each arm's turn lasts: longer where its times are not steady, as at a GPU's power limit."""

from __future__ import annotations

import json
from itertools import chain, repeat
from pathlib import Path
from random import Random

import pytest

from helpers.fakes import H100, H200, FakeProcess, install, timed
from helpers.power_limited import PowerLimited, pool_of_limited_arms
from pytest_fp8 import Case
from pytest_fp8.arms.pair import PairArms
from pytest_fp8.arms.pool import ArmPool
from pytest_fp8.gpu import Conditions
from pytest_fp8.questions.speed.check import check_speedup
from pytest_fp8.questions.speed.evidence import timing_of
from pytest_fp8.questions.speed.timing import BlockTimer, unsteady, unsteady_pair
from pytest_fp8.verdicts import Verdict

RECORDINGS = Path(__file__).parent.parent / "benchmarks" / "gate" / "recordings"


@pytest.fixture
def pool(monkeypatch):
    with pool_of_limited_arms(monkeypatch) as made:
        yield made


def recorded(prefix, blocks):
    """Each process of these recordings, as (name, whether either arm's turns are unsteady in so many blocks)."""
    for path in sorted(RECORDINGS.glob(f"{prefix}*.json")):
        for process in json.loads(path.read_text())["processes"]:
            yield path.name, unsteady_pair(process["bf16"][: 2 * blocks], process["fp8"][: 2 * blocks])


FIRST_AND_ALL = pytest.mark.parametrize("blocks", [6, 12])


@FIRST_AND_ALL
def test_every_recorded_process_of_1b_is_steady(blocks):
    assert [name for name, moved in recorded("1b", blocks) if moved] == []


@FIRST_AND_ALL
def test_every_recorded_process_of_8b_with_transformer_engine_is_not(blocks):
    assert [name for name, moved in recorded("8b-te", blocks) if not moved] == []


@pytest.mark.parametrize(
    ("times", "moved"),
    [([100, 103] * 6, True), ([103, 100] * 6, True), ([100, 101] * 6, False), ([100, 103], False), ([], False)],
)
def test_a_turn_whose_second_block_differs_is_unsteady(times, moved):
    assert unsteady(times) is moved


def test_one_slow_block_is_no_trend():
    assert not unsteady([100, 100, 100, 160, 100, 101, 101, 100, 100, 100, 101, 100])


def test_a_busy_host_is_no_trend():
    """Pauses lengthen a third or a half of the blocks by a tenth on average, as with Transformer Engine at 1B."""
    random = Random(1)

    def pause(share):
        return random.gauss(0, 0.005) + (random.expovariate(10) if random.random() < share else 0)

    for share in (1 / 3, 1 / 2):
        blocks = [[98 * (1 + pause(share)) for _ in range(16)] for _ in range(1000)]
        assert sum(unsteady_pair([100.0] * 16, each) for each in blocks) < 10


def test_turns_are_not_lengthened_for_the_clocks_that_follow_the_pauses_of_a_busy_host():
    """Seen on an H100 with Transformer Engine at 1B: the FP8 arm waits for its host, BF16's first blocks are faster for
    it, and longer turns took two minutes where step time is not gated on."""
    drifts = [124.5, 127.5] * 8
    pauses = [142, 117, 148, 165, 141, 126, 164, 131, 132, 126, 144, 167, 163, 164, 160, 159]
    assert unsteady(drifts)
    assert unsteady_pair([140.0] * 16, drifts)
    assert not unsteady_pair(pauses, drifts)


def test_turns_at_the_power_limit_are_taken_again_and_last_longer(pool):
    arms = PairArms(Case("8b", "torchao", "tensorwise"), pool, None)
    arms.start()
    timer = BlockTimer(arms)
    timing = arms.run(lambda: timing_of(arms, timer, 0))
    assert [len(timing.bf16[0]), len(timing.fp8[0])] == [12, 12]
    assert all(time == pytest.approx(280, rel=0.01) for time in timing.fp8[0]), "the transient is in no block"
    assert all(time == pytest.approx(370, rel=0.01) for time in timing.bf16[0])
    steps, dropped = PowerLimited.sizes[-1]
    assert dropped * 280 > 1400, "what the other arm's power left lasts half a second, and a rest's a second more"
    assert steps == 1, "a block, as of arms that do not fit together"
    assert (timer.recording()["dropped_steps"], timer.recording()["order"]) == (dropped, "turns")


def test_arms_that_settle_slowly_wait_for_it_three_times_a_pair(pool):
    arms = PairArms(Case("8b", "torchao", "tensorwise"), pool, None)
    arms.start()
    timer = BlockTimer(arms)
    arms.run(lambda: timer.measure(2, 6))
    assert not arms.takes_turns, "both stay where they are"
    assert [(turn.arm, turn.steps) for turn in timer.beside.turns] == [("BF16", 6), ("FP8", 12), ("BF16", 6)] * 2


@pytest.mark.parametrize("tight", [True, False])
def test_arms_that_give_their_memory_back_do_so_after_three_turns(pool, monkeypatch, tight):
    monkeypatch.setattr("pytest_fp8.arms.pool.ArmProcess", FakeProcess)
    monkeypatch.setattr(ArmPool, "tight", lambda *arms, looked_at=False: tight)
    arms = PairArms(Case("1b", "torchao", "tensorwise"), pool, None)
    arms.start()
    timer = BlockTimer(arms)
    arms.run(lambda: timer.measure(1, 6))
    assert timer.recording()["order"] == ("turns" if tight else "abba")
    assert len(timer.beside.turns) == (3 if tight else 13)
    assert timer.recording()["dropped_steps"] == (pytest.approx(20, abs=1) if tight else 1), (
        "a second and a half, or one"
    )


class Rested(FakeProcess):
    """Its clocks swing for a second and a half after a rest; they have none where the arms alternate."""

    sizes: list[int] = []  # noqa: RUF012

    def blocks(self, count, steps, dropped):
        self.sizes.append(dropped)
        base = 358.0 if self.is_fp8 else 437.0
        ended = [(dropped + (index + 1) * steps) * base for index in range(count)]
        swing = [0.03 * (-1) ** index * (count > 2 and end < 1500) for index, end in enumerate(ended)]
        return timed([float(base * (1 + each + self.noise.normal(0, 0.002))) for each in swing])


@pytest.mark.parametrize(("gpu", "dropped"), [(H100, 5), (H200, 1)])
def test_a_turn_after_a_rest_begins_when_the_clocks_have_settled(monkeypatch, gpu, dropped):
    install(monkeypatch, gpu)
    monkeypatch.setattr("pytest_fp8.arms.pool.ArmProcess", Rested)
    Rested.sizes = []
    pool = ArmPool(gpu)
    arms = PairArms(Case("8b", "torchao", "tensorwise"), pool, None)
    arms.start()
    timing = arms.run(lambda: timing_of(arms, BlockTimer(arms), 0))
    assert arms.takes_turns is (gpu is H100)
    assert timing.bf16[0] == pytest.approx([437.0] * 12, rel=0.01)
    assert timing.fp8[0] == pytest.approx([358.0] * 12, rel=0.01)
    assert Rested.sizes[-1] == dropped
    pool.close()


def test_compilations_in_blocks_are_counted_and_those_before_are_not(pool, monkeypatch):
    counts = iter([7] * 3 + [1] * 100)  # the rough step and both arms' first turns, then those that count

    def blocks(self, count, steps, dropped):
        return timed([100.0] * count, next(counts))

    monkeypatch.setattr(PowerLimited, "blocks", blocks)
    arms = PairArms(Case("1b", "torchao", "tensorwise"), pool, None)
    arms.start()
    timing = arms.run(lambda: timing_of(arms, BlockTimer(arms), 0))
    assert timing.compilations == {"BF16": 7, "FP8": 6}


def told_of(pool, monkeypatch, readings):
    monkeypatch.setattr("pytest_fp8.plan.conditions", lambda *_: next(readings))
    arms = PairArms(Case("8b", "torchao", "tensorwise"), pool, None)
    arms.start()
    return check_speedup(arms.run(lambda: timing_of(arms, BlockTimer(arms), 0)), floor=1.0, tolerance=0.02)


COOL, HOT = Conditions(1695), Conditions(1395, ("software thermal",))


def test_what_was_seen_beside_blocks_that_are_taken_again_does_not_count(pool, monkeypatch):
    """The first six readings stand beside blocks that are taken again in longer turns."""
    assert told_of(pool, monkeypatch, chain([HOT] * 6, repeat(COOL))).verdict is Verdict.PASS


@pytest.mark.parametrize("disturbed", [HOT, Conditions(1695, (), (4242,))])
@pytest.mark.parametrize(("times", "verdict"), [(1, Verdict.PASS), (2, Verdict.INVALID)])
def test_a_disturbed_pair_is_taken_again_once(pool, monkeypatch, disturbed, times, verdict):
    readings = chain([COOL] * 6, *[[disturbed, COOL, COOL]] * times, repeat(COOL))
    assert told_of(pool, monkeypatch, readings).verdict is verdict


@pytest.mark.parametrize(
    ("readings", "disturbed", "pairs"),
    [
        ([[HOT, COOL, COOL], [COOL] * 3, [COOL] * 3, [COOL, HOT, COOL], [COOL] * 3], 0, 5),
        ([[HOT] * 3, [HOT] * 3, [HOT] * 3, [HOT] * 3], 9, 4),
    ],
    ids=["each pair has a second try", "none where the second one was no better"],
)
def test_a_gpu_that_is_hot_now_and_then_has_an_answer(pool, monkeypatch, readings, disturbed, pairs):
    seen = chain([COOL] * 6, *readings)
    monkeypatch.setattr("pytest_fp8.plan.conditions", lambda *_: next(seen))
    arms = PairArms(Case("8b", "torchao", "tensorwise"), pool, None)
    arms.start()
    timer = BlockTimer(arms)
    arms.run(lambda: timer.measure(3, 6))
    assert len(timer.other) == 3
    assert sum(bool(state.throttles) for state in timer.beside.states) == disturbed
    assert next(seen, None) is None, f"{pairs} pairs of blocks were taken"


def test_throttled_clocks_are_told_with_how_often_they_were_seen(pool, monkeypatch):
    decision = told_of(pool, monkeypatch, chain([COOL] * 6, [HOT] * 3, [HOT], repeat(COOL)))
    assert decision.verdict is Verdict.INVALID
    assert "software thermal in 1 of 3 readings; SM clocks of 1395 to 1695 MHz" in decision.message
