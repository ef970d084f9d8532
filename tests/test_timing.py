"""How blocks of two arms are taken: how long turns last, which pairs are taken again, what stands beside them."""

from __future__ import annotations

import json
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from random import Random

import pytest

from helpers.fakes import FakeProcess, timed
from helpers.power_limited import PowerLimited, pool_of_limited_arms
from pytest_fp8 import Case
from pytest_fp8.arms.pair import PairArms
from pytest_fp8.arms.pool import ArmPool
from pytest_fp8.gpu import Conditions
from pytest_fp8.questions.speed.check import check_speedup
from pytest_fp8.questions.speed.evidence import timing_for_baseline, timing_of
from pytest_fp8.questions.speed.timing import BlockTimer, unsteady, unsteady_pair
from pytest_fp8.stats.looks import BASELINE_BLOCKS
from pytest_fp8.verdicts import Verdict

RECORDINGS = Path(__file__).parent.parent / "benchmarks" / "gate" / "recordings"


@pytest.fixture
def pool(monkeypatch):
    with pool_of_limited_arms(monkeypatch) as made:
        yield made


def arms_of(pool, model="8b", recipe="tensorwise"):
    arms = PairArms(Case(model, "torchao", recipe), pool, None)
    arms.start()
    return arms


# -- how long a turn lasts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prefix", "moves"), [("1b", False), ("8b-te", True)])
@pytest.mark.parametrize("blocks", [6, 12])
def test_recorded_turns_are_unsteady_at_8b_with_transformer_engine_and_never_at_1b(prefix, moves, blocks):
    for path in sorted(RECORDINGS.glob(f"{prefix}*.json")):
        for process in json.loads(path.read_text())["processes"]:
            assert unsteady_pair(process["bf16"][: 2 * blocks], process["fp8"][: 2 * blocks]) is moves, path.name


@pytest.mark.parametrize(
    ("times", "moved"),
    [
        ([100, 103] * 6, True),
        ([103, 100] * 6, True),
        ([100, 101] * 6, False),
        ([100, 103], False),
        ([], False),
        ([100, 100, 100, 160, 100, 101, 101, 100, 100, 100, 101, 100], False),
    ],
)
def test_a_turn_whose_second_block_differs_is_unsteady(times, moved):
    assert unsteady(times) is moved


def test_a_busy_host_is_no_trend():
    """Pauses lengthen a third or a half of the blocks by a tenth on average, as with Transformer Engine at 1B. On an
    H100 the FP8 arm waits for its host, and BF16's first blocks are faster for it."""
    random = Random(1)

    def pause(share):
        return random.gauss(0, 0.005) + (random.expovariate(10) if random.random() < share else 0)

    for share in (1 / 3, 1 / 2):
        blocks = [[98 * (1 + pause(share)) for _ in range(16)] for _ in range(1000)]
        assert sum(unsteady_pair([100.0] * 16, each) for each in blocks) < 10
    drifts = [124.5, 127.5] * 8
    pauses = [142, 117, 148, 165, 141, 126, 164, 131, 132, 126, 144, 167, 163, 164, 160, 159]
    assert unsteady_pair([140.0] * 16, drifts)
    assert not unsteady_pair(pauses, drifts)


def test_turns_at_the_power_limit_are_taken_again_and_last_longer(pool):
    arms = arms_of(pool)
    timer = BlockTimer(arms)
    timing = arms.run(lambda: timing_of(arms, timer, 1))
    assert [len(blocks) for blocks in (*timing.bf16, *timing.fp8)] == [12] * 4
    assert all(time == pytest.approx(280, rel=0.01) for time in timing.fp8[0]), "the transient is in no block"
    assert all(time == pytest.approx(370, rel=0.01) for time in timing.bf16[0])
    steps, dropped = PowerLimited.sizes[-1]
    assert dropped * 280 > 1400, "what the other arm's power left lasts half a second, and a rest's a second more"
    assert (steps, timer.recording()["dropped_steps"], timer.recording()["order"]) == (1, dropped, "turns")
    assert not arms.takes_turns, "both stay where they are"
    assert [(turn.arm, turn.steps) for turn in timing.beside.turns] == [("BF16", 6), ("FP8", 12), ("BF16", 6)] * 2
    another, before = arms_of(pool, recipe="rowwise"), len(PowerLimited.sizes)
    another.run(partial(timing_of, another, BlockTimer(another), 0))
    assert {asked[1] for asked in PowerLimited.sizes[before:]} == {dropped}, "of the same reference"


@pytest.mark.parametrize("tight", [True, False])
def test_arms_that_give_their_memory_back_do_so_after_three_turns(pool, monkeypatch, tight):
    monkeypatch.setattr("pytest_fp8.arms.pool.ArmProcess", FakeProcess)
    monkeypatch.setattr(ArmPool, "tight", lambda *arms, looked_at=False: tight)
    arms = arms_of(pool, "1b")
    timer = BlockTimer(arms)
    arms.run(lambda: timer.measure(1, 6))
    said = timer.recording()
    assert (said["order"], len(said["turns"])) == (("turns", 3) if tight else ("abba", 13))
    assert said["dropped_steps"] == (pytest.approx(20, abs=1) if tight else 1), "a second and a half, or one"


def test_an_update_takes_more_blocks_and_asks_each_arm_for_its_profile_once(pool, monkeypatch):
    asked, request = [], PowerLimited.request

    def noted(self, operation, *rest, **arguments):
        asked.append((operation, self.pid))
        return request(self, operation, *rest, **arguments)

    monkeypatch.setattr(PowerLimited, "request", noted)
    arms = arms_of(pool, "1b")
    timing = arms.run(lambda: timing_for_baseline(arms, BlockTimer(arms), 3))
    assert {len(times) for times in timing.fp8} == {2 * BASELINE_BLOCKS}
    assert len({pid for what, pid in asked if what == "blocks"}) == 6, "three pairs"
    first = [[pid for what, pid in asked if what == operation] for operation in ("layers", "ledger")]
    assert sorted(first[0]) == sorted(first[1])
    assert len(first[0]) == 2


# -- pairs that are taken again -----------------------------------------------------------------------------------

COOL, HOT, SHARED = Conditions(1695), Conditions(1395, ("software thermal",)), Conditions(1695, (), (4242,))


@pytest.mark.parametrize(
    ("readings", "verdict"),
    [
        ([[HOT] * 6], Verdict.PASS),
        ([[COOL] * 6, [HOT, COOL, COOL]], Verdict.PASS),
        ([[COOL] * 6, [HOT, COOL, COOL], [HOT, COOL, COOL]], Verdict.INVALID),
    ],
    ids=["before turns were lengthened", "hot once", "hot twice"],
)
def test_a_disturbed_pair_is_taken_again_once(pool, monkeypatch, readings, verdict):
    seen = chain(*readings, repeat(COOL))
    monkeypatch.setattr("pytest_fp8.plan.conditions", lambda *_: next(seen))
    arms = arms_of(pool)
    decision = check_speedup(arms.run(lambda: timing_of(arms, BlockTimer(arms), 0)), floor=1.0, tolerance=0.02)
    assert decision.verdict is verdict
    hot = "software thermal in 1 of 3 readings; SM clocks of 1395 to 1695 MHz"
    assert (hot in decision.message) is (readings[-1][0] is HOT and verdict is Verdict.INVALID)


def test_compilations_in_blocks_are_counted_and_those_before_are_not(pool, monkeypatch):
    counts = iter([7] * 3 + [1] * 100)  # the rough step and both arms' first turns, then those that count
    monkeypatch.setattr(
        PowerLimited, "blocks", lambda self, count, steps, dropped: timed([100.0] * count, next(counts))
    )
    arms = arms_of(pool, "1b")
    timing = arms.run(lambda: timing_of(arms, BlockTimer(arms), 0))
    counts = {arm: sum(turn.compilations for turn in timing.beside.turns if turn.arm == arm) for arm in ("BF16", "FP8")}
    assert counts == {"BF16": 7, "FP8": 6}
