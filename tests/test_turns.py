"""How long each arm's turn lasts: longer where the times of a turn are not steady, as at a GPU's power limit."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from random import Random

import pytest

from helpers.fakes import H100, H200, FakeProcess, install, timed
from pytest_fp8 import Case
from pytest_fp8.arms.pair import PairArms
from pytest_fp8.arms.pool import ArmPool
from pytest_fp8.gpu import Conditions
from pytest_fp8.questions.speed import evidence
from pytest_fp8.questions.speed.check import check_speedup
from pytest_fp8.questions.speed.evidence import (
    FURTHER,
    TimingEvidence,
    busy_ratios,
    judged_busy,
    timing_for_baseline,
    timing_of,
)
from pytest_fp8.questions.speed.question import SpeedQuestion
from pytest_fp8.questions.speed.timing import BlockTimer, unsteady, unsteady_pair
from pytest_fp8.rules.speed import BASELINE_BLOCKS, LOOKS, PAIR_LOOKS
from pytest_fp8.rules.variance import MEASURED
from pytest_fp8.verdicts import Verdict

RECORDINGS = Path(__file__).parent.parent / "benchmarks" / "gate" / "recordings"


def recorded(prefix, blocks):
    """Each process of these recordings, as (name, whether either arm's turns are unsteady in so many blocks)."""
    for path in sorted(RECORDINGS.glob(f"{prefix}*.json")):
        for process in json.loads(path.read_text())["processes"]:
            yield path.name, unsteady_pair(process["bf16"][1 : 2 * blocks], process["fp8"][: 2 * blocks])


FIRST_AND_ALL = pytest.mark.parametrize("blocks", [LOOKS[0][1], 12])


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
        assert sum(map(unsteady_pair, blocks)) < 10


def test_turns_are_not_lengthened_for_the_clocks_that_follow_the_pauses_of_a_busy_host():
    """Seen on an H100 with Transformer Engine at 1B: the FP8 arm waits for its host, BF16's first blocks are faster for
    it, and longer turns took two minutes where step time is not gated on."""
    drifts = [124.5, 127.5] * 8
    pauses = [142, 117, 148, 165, 141, 126, 164, 131, 132, 126, 144, 167, 163, 164, 160, 159]
    assert unsteady(drifts)
    assert unsteady_pair(drifts, [140.0] * 16)
    assert not unsteady_pair(drifts, pauses)


class PowerLimited(FakeProcess):
    """Each arm's first half second of a turn runs at the clocks that the other arm's power left."""

    sizes: list[tuple[int, int]] = []  # noqa: RUF012

    def blocks(self, count, steps, dropped):
        self.sizes.append((steps, dropped))
        base, first = (280.0, 0.95) if self.is_fp8 else (370.0, 1.04)
        done, times = dropped * base, []
        for _ in range(count):
            early = [done + index * base < 500 for index in range(steps)]
            times.append(sum(base * (first if x else 1.0) for x in early) / steps)
            done += steps * base
        noisy = [float(time * math.exp(self.noise.normal(0, 0.002))) for time in times]
        return timed(noisy)


@pytest.fixture
def pool(monkeypatch):
    install(monkeypatch, H200)
    monkeypatch.setattr("pytest_fp8.arms.pool.ArmProcess", PowerLimited)
    PowerLimited.sizes = []
    made = ArmPool(H200)
    yield made
    made.close()


def test_turns_at_the_power_limit_are_taken_again_and_last_longer(pool):
    arms = PairArms(Case("8b", "torchao", "tensorwise"), pool, None)
    arms.start()
    timer = BlockTimer(arms)
    timing = timing_of(arms, timer, 0)
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
    timer.measure(2, 6)
    assert not arms.takes_turns, "both stay where they are"
    assert [(turn.arm, turn.steps) for turn in timer.beside.turns] == [("BF16", 6), ("FP8", 12), ("BF16", 6)] * 2


@pytest.mark.parametrize("tight", [True, False])
def test_arms_that_give_their_memory_back_do_so_after_three_turns(pool, monkeypatch, tight):
    monkeypatch.setattr("pytest_fp8.arms.pool.ArmProcess", FakeProcess)
    monkeypatch.setattr(ArmPool, "tight", lambda *arms, looked_at=False: tight)
    arms = PairArms(Case("1b", "torchao", "tensorwise"), pool, None)
    arms.start()
    timer = BlockTimer(arms)
    timer.measure(1, 6)
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
    timing = timing_of(arms, BlockTimer(arms), 0)
    assert arms.takes_turns is (gpu is H100)
    assert timing.bf16[0] == pytest.approx([437.0] * 12, rel=0.01)
    assert timing.fp8[0] == pytest.approx([358.0] * 12, rel=0.01)
    assert Rested.sizes[-1] == dropped
    pool.close()


def first_pair(pool, model, settled):
    """What the first pair of a case of this model takes, where its first blocks settle it or not."""
    arms = PairArms(Case(model, "torchao", "tensorwise"), pool, None)
    arms.start()
    return timing_of(arms, BlockTimer(arms, settled), 0)


class ReferenceDrifts(FakeProcess):
    """The reference's first block of each turn is faster by 3 %, unless its first second does not count."""

    def blocks(self, count, steps, dropped):
        base, drifts = (280.0, 0.0) if self.is_fp8 else (370.0, 0.03)
        late = dropped * base > 1000
        times = [base * (1.0 if late or index else 1 - drifts) for index in range(count)]
        noisy = [float(time * math.exp(self.noise.normal(0, 0.001))) for time in times]
        return timed(noisy)


@pytest.mark.parametrize("settled", [True, False, None])
def test_a_reference_whose_turns_are_unsteady_is_seen_in_the_first_blocks_too(pool, monkeypatch, settled):
    monkeypatch.setattr("pytest_fp8.arms.pool.ArmProcess", ReferenceDrifts)
    timing = first_pair(pool, "8b", None if settled is None else Asked(settled))
    assert timing.bf16[0] == pytest.approx([370.0] * (6 if settled else 12), rel=0.005)


class Asked:
    """Whether the first blocks settle it; notes what was asked of the arms before."""

    def __init__(self, answer):
        self.answer, self.seen = answer, []

    def __call__(self, reference, other):
        self.seen.append((list(reference), list(other)))
        return self.answer


@pytest.mark.parametrize(("answer", "blocks"), [(True, 3), (False, 6)])
def test_the_first_pair_goes_on_where_its_first_blocks_settle_nothing(pool, answer, blocks):
    asked = Asked(answer)
    timing = first_pair(pool, "1b", asked)
    assert [len(timing.bf16[0]), len(timing.fp8[0])] == [2 * blocks, 2 * blocks]
    [(reference, other)] = asked.seen
    assert (reference, other) == (timing.bf16[0][:6], timing.fp8[0][:6])


@pytest.mark.parametrize(("answer", "blocks"), [(True, 3), (False, 6)])
def test_what_is_asked_of_the_first_blocks_is_asked_of_the_longer_turns(pool, answer, blocks):
    asked = Asked(answer)
    timing = first_pair(pool, "8b", asked)
    assert len(timing.fp8[0]) == 2 * blocks
    assert timing.fp8[0] == pytest.approx([280.0] * 2 * blocks, rel=0.01)
    assert len(asked.seen) == 1
    assert asked.seen[0][0] == pytest.approx([370.0] * 6, rel=0.01)


def test_turns_that_only_all_blocks_show_to_be_unsteady_are_taken_again_as_a_whole(pool, monkeypatch):
    seen = []

    def late(reference, other):
        seen.append(len(other))
        return len(other) > 6

    monkeypatch.setattr("pytest_fp8.questions.speed.timing.unsteady_pair", late)
    timing = first_pair(pool, "8b", Asked(False))
    assert seen == [6, 12]
    assert timing.fp8[0] == pytest.approx([280.0] * 12, rel=0.01)


@pytest.mark.parametrize(("metric", "blocks"), [("speedup", 3), ("busy_speedup", 6)])
def test_a_case_that_is_judged_by_busy_times_takes_all_blocks(monkeypatch, metric, blocks):
    install(monkeypatch, H200, speedup=1.2)
    pool = ArmPool(H200)
    arms = PairArms(Case("1b", "torchao", "tensorwise"), pool, None)
    arms.start()
    session = [[math.log(1.2)] * 8] * 2

    def history(name):
        return [session] if name in (metric, "speedup") else []

    question = SpeedQuestion(arms, metric == "busy_speedup", history, MEASURED, "file", 30)
    assert {len(times) for times in question.first_timing().fp8} == {2 * blocks}
    pool.close()


def test_later_pairs_and_those_of_a_baseline_take_all_blocks_at_once(pool):
    arms = PairArms(Case("1b", "torchao", "tensorwise"), pool, None)
    arms.start()
    found = timing_of(arms, BlockTimer(arms, Asked(True)), 1)
    assert [len(times) for times in found.fp8] == [6, 12]
    arms = PairArms(Case("1b", "torchao", "rowwise"), pool, None)
    arms.start()
    question = SpeedQuestion(arms, False, lambda _: [], MEASURED, "file", 30, processes=2)
    assert {len(times) for times in question.first_timing().fp8} == {2 * BASELINE_BLOCKS}


def test_a_further_case_of_the_reference_begins_with_the_longer_turns(pool):
    for recipe in ("tensorwise", "rowwise"):
        arms = PairArms(Case("8b", "torchao", recipe), pool, None)
        arms.start()
        before = len(PowerLimited.sizes)
        timing_of(arms, BlockTimer(arms), 0)
    assert {asked[1] for asked in PowerLimited.sizes[before:]} == {PowerLimited.sizes[-1][1]}


def test_compilations_in_blocks_are_counted_and_those_before_are_not(pool, monkeypatch):
    counts = iter([7] * 3 + [1] * 100)  # the rough step and both arms' first turns, then those that count

    def blocks(self, count, steps, dropped):
        return timed([100.0] * count, next(counts))

    monkeypatch.setattr(PowerLimited, "blocks", blocks)
    arms = PairArms(Case("1b", "torchao", "tensorwise"), pool, None)
    arms.start()
    timing = timing_of(arms, BlockTimer(arms), 0)
    assert timing.compilations == {"BF16": 7, "FP8": 6}


def told_of(pool, monkeypatch, readings):
    monkeypatch.setattr("pytest_fp8.arms.pair.conditions", lambda *_: next(readings))
    arms = PairArms(Case("8b", "torchao", "tensorwise"), pool, None)
    arms.start()
    return check_speedup(timing_of(arms, BlockTimer(arms), 0), floor=1.0, tolerance=0.02)


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
    monkeypatch.setattr("pytest_fp8.arms.pair.conditions", lambda *_: next(seen))
    arms = PairArms(Case("8b", "torchao", "tensorwise"), pool, None)
    arms.start()
    timer = BlockTimer(arms)
    timer.measure(3, 6)
    assert len(timer.other) == 3
    assert sum(bool(state.throttles) for state in timer.beside.states) == disturbed
    assert next(seen, None) is None, f"{pairs} pairs of blocks were taken"


def test_throttled_clocks_are_told_with_how_often_they_were_seen(pool, monkeypatch):
    decision = told_of(pool, monkeypatch, chain([COOL] * 6, [HOT] * 3, [HOT], repeat(COOL)))
    assert decision.verdict is Verdict.INVALID
    assert "software thermal in 1 of 3 readings; SM clocks of 1395 to 1695 MHz" in decision.message


class Waiting(FakeProcess):
    """The GPU works 40 ms of each step of 100 ms in BF16, and 32 ms in FP8."""

    asked_busy: list[int] = []  # noqa: RUF012

    @property
    def works(self):
        return 32.0 if self.is_fp8 else 40.0

    def layers(self):
        found = super().layers()
        found["milliseconds"]["busy"] = self.works
        return {**found, **self.steps()}

    def busy(self, steps):
        self.asked_busy.append(self.pid)
        return self.steps(steps)

    def steps(self, count=5):
        works = [self.works * float(1 + self.noise.normal(0, 0.001)) for _ in range(count)]
        return {"step_ms": [100.0] * count, "busy_ms": works, "compute_ms": works, "collectives": []}


def updated(processes, on_busy=False):
    """What an update decides and stores of the speed of a case of 1B."""
    pool = ArmPool(H200)
    arms = PairArms(Case("1b", "torchao", "tensorwise"), pool, None)
    arms.start()
    question = SpeedQuestion(arms, on_busy, lambda _: [], MEASURED, "file.json", 30, processes=processes)
    decision, rows = question.decide(None)
    pool.close()
    return decision, {name: values for name, values, _ in rows}


@pytest.mark.parametrize("works", [True, False], ids=["launch-bound", "busy"])
def test_busy_times_are_asked_of_every_process_that_waits(monkeypatch, works):
    install(monkeypatch, H200, busy=99.0 if not works else 40.0, kernels_alone=True)
    monkeypatch.setattr("pytest_fp8.arms.pool.ArmProcess", Waiting if works else FakeProcess)
    Waiting.asked_busy = []
    decision, stored = updated(3)
    assert len(stored["speedup"]) == 3
    account = decision.numbers["account"]
    assert [stored["earned_ms"], stored["casts_ms"]] == [[account["earned_ms"]], [account["casts_ms"]]]
    if not works:
        assert "busy_speedup" not in stored
        assert stored["speedup_limit"] == [account["limit"]]
        assert "bf16_wire_ms" not in stored, "one GPU"
        return
    assert {len(process) for process in stored["busy_speedup"]} <= {30, 32}, "3 s of steps of about 100 ms"
    assert stored["busy_speedup"][2][0] == pytest.approx(math.log(40 / 32), abs=0.01)
    assert len(set(Waiting.asked_busy)) == 6, "both arms of each pair"
    assert decision.numbers["gated_on"] == "busy time"
    assert [stored["bf16_busy_ms"][0], stored["fp8_busy_ms"][0]] == pytest.approx([40, 32], abs=0.1)
    assert stored["speedup_limit"] == [decision.numbers["account"]["busy_limit"]], "of what is gated on"


class LateWaiting(Waiting):
    """The host is quiet while some pairs are timed."""

    slow: tuple[int, ...] = ()
    """Pairs whose steps wait, the first one is 1."""

    def blocks(self, count, steps, dropped):
        waits = len(self.world.built) // 2 in self.slow
        return timed([100.0 if waits else self.works + 1] * count)

    def busy(self, steps):
        return {**super().busy(steps), "step_ms": [self.works + 1] * steps}


@pytest.mark.parametrize("slow", [(2,), (4,), (1, 3), ()], ids=["second", "fourth", "some", "never"])
def test_an_update_has_busy_times_of_every_pair_whichever_waits(monkeypatch, slow):
    """Seen with Transformer Engine at 1B: on one H200 the first of four pairs did not wait, on another the fourth alone
    did, after 114.8, 114.8 and 116.6 ms a step; and both updates were refused for the scatter of step time."""
    install(monkeypatch, H200, busy=40.0, host=0.5)
    monkeypatch.setattr("pytest_fp8.arms.pool.ArmProcess", LateWaiting)
    monkeypatch.setattr(LateWaiting, "slow", slow)
    decision, stored = updated(4)
    assert [len(stored["speedup"]), len(stored.get("busy_speedup", ()))] == [4, 4 if slow else 0]
    assert len(stored.get("quiet_busy_speedup", ())) == (0 if slow else 4), "for a gate on a host that an arm waits for"
    assert decision.numbers["gated_on"] == ("busy time" if slow else "step time")
    assert "1.25" in decision.seen or not slow


def test_an_update_of_what_is_gated_on_busy_time_stores_it_again_though_nothing_waits(monkeypatch):
    """Or the history that the gate asks would have no new session."""
    install(monkeypatch, H200, busy=40.0)
    monkeypatch.setattr("pytest_fp8.arms.pool.ArmProcess", LateWaiting)
    monkeypatch.setattr(LateWaiting, "slow", ())
    _, stored = updated(2, on_busy=True)
    assert len(stored["busy_speedup"]) == 2


@pytest.mark.parametrize(
    ("kept", "slower", "verdict"),
    [
        (["speedup", "bf16_ms", "quiet_busy_speedup"], 1.0, Verdict.PASS),
        (["speedup", "bf16_ms", "quiet_busy_speedup"], 1.2, Verdict.FAIL),
        (["speedup", "bf16_ms"], 1.0, Verdict.INVALID),
    ],
)
def test_a_baseline_of_a_quiet_host_is_asked_on_a_slow_one(monkeypatch, kept, slower, verdict):
    """Seen at 8B with Transformer Engine on an H200: stored at 1.254x of steps on a quiet host, four pairs of processes
    at 1.03x to 1.28x on a busy one decided nothing."""
    install(monkeypatch, H200, busy=40.0, host=0.5)
    monkeypatch.setattr("pytest_fp8.arms.pool.ArmProcess", LateWaiting)
    monkeypatch.setattr(LateWaiting, "slow", ())
    _, stored = updated(4)
    install(monkeypatch, H200, busy=40.0, host=0.5)
    monkeypatch.setattr("pytest_fp8.arms.pool.ArmProcess", LateWaiting)
    monkeypatch.setattr(LateWaiting, "slow", (1, 2, 3, 4))
    monkeypatch.setattr(LateWaiting, "works", property(lambda self: 32.0 * slower if self.is_fp8 else 40.0))
    pool = ArmPool(H200)
    arms = PairArms(Case("1b", "torchao", "tensorwise"), pool, None)
    arms.start()
    question = SpeedQuestion(
        arms, False, lambda name: [stored[name]] if name in kept else [], MEASURED, "file.json", 30
    )
    decision, _ = question.decide(None)
    pool.close()
    assert decision.verdict is verdict, decision.message
    if verdict is not Verdict.INVALID:
        assert decision.numbers["gated_on"] == "busy time"
        assert decision.numbers["gated_baseline"] == pytest.approx(1.25, abs=0.01)


def gated(monkeypatch, slow):
    """All looks of a gate, of pairs of which these are slow."""
    install(monkeypatch, H200, busy=40.0)
    monkeypatch.setattr("pytest_fp8.arms.pool.ArmProcess", LateWaiting)
    monkeypatch.setattr(LateWaiting, "slow", slow)
    pool = ArmPool(H200)
    arms = PairArms(Case("1b", "torchao", "tensorwise"), pool, None)
    arms.start()
    timer = BlockTimer(arms)
    taken = [timing_of(arms, timer, look) for look in range(len(PAIR_LOOKS))][-1]
    pool.close()
    return taken


@pytest.mark.parametrize("slow", [(2, 3, 4), (2,)], ids=["from then on", "once"])
def test_a_gate_takes_busy_times_from_the_first_pair_that_waits(monkeypatch, slow):
    """A later pair that does not wait changes nothing of what an earlier one showed."""
    taken = gated(monkeypatch, slow)
    assert [bool(times) for times in taken.fp8_busy] == [False, True, True, True]
    assert taken.waited, "which all blocks together need not show"
    assert len(judged_busy(taken)) == 3


def test_a_pair_that_waits_last_is_not_judged_alone(monkeypatch):
    """Its busy times are one process's, and may be off by chance."""
    taken = gated(monkeypatch, slow=(4,))
    assert [bool(times) for times in taken.fp8_busy] == [False, False, False, True]
    assert judged_busy(taken) == []
    assert judged_busy(replace(taken, fp8_busy=[[32.0]] * len(taken.fp8), bf16_busy=[[40.0]] * len(taken.fp8)))


@pytest.mark.parametrize(("waits", "asked"), [(True, [5, 0]), (False, [0, 0])])
def test_arms_that_take_turns_have_the_busy_times_of_their_profile_where_one_waits(monkeypatch, waits, asked):
    """Others would cost a build of each. Of an arm that does not wait an update needs none."""
    install(monkeypatch, H200, busy=40.0 if waits else 99.0, kernels_alone=True)
    monkeypatch.setattr("pytest_fp8.arms.pool.ArmProcess", Waiting if waits else FakeProcess)
    pool = ArmPool(H200, turns=lambda case, gpu: True)
    arms = PairArms(Case("1b", "torchao", "tensorwise"), pool, None)
    arms.start()
    timer = BlockTimer(arms)
    timer.wants_busy = True
    taken = timing_for_baseline(arms, timer, 2, lambda _: True)
    pool.close()
    assert arms.takes_turns
    assert [len(times) for times in taken.fp8_busy] == asked


def test_a_step_that_the_profiler_lost_is_left_out():
    taken = TimingEvidence([[1.0]], [[1.0]], bf16_busy=[[40.0, 0.0, 40.0], [0.0]], fp8_busy=[[32.0, 32.0, 0.0], [32.0]])
    assert busy_ratios(taken) == [[pytest.approx(math.log(40 / 32))]]


def test_no_further_pair_is_timed_for_busy_times_that_no_profile_can_give(monkeypatch):
    install(monkeypatch, H200, busy=40.0)  # it waits; its profile has no steps of kernels alone
    _, stored = updated(2)
    assert [len(stored.get(name, ())) for name in ("speedup", "busy_speedup")] == [2, 0]


@pytest.mark.parametrize(("fit_at", "measured"), [(1, 2), (3, 3), (9, 2 + FURTHER)])
def test_an_update_measures_a_few_more_pairs_until_they_can_be_stored(monkeypatch, fit_at, measured):
    install(monkeypatch, H200)
    pool = ArmPool(H200)
    arms = PairArms(Case("1b", "torchao", "tensorwise"), pool, None)
    arms.start()
    taken = timing_for_baseline(arms, BlockTimer(arms), 2, lambda found: len(found.fp8) >= fit_at)
    pool.close()
    assert len(taken.fp8) == len(taken.bf16) == measured


@pytest.mark.parametrize(("noise", "pairs"), [(0.0, 2), (0.5, 2 + FURTHER)])
def test_pairs_that_can_gate_at_the_tolerance_are_enough(monkeypatch, noise, pairs):
    install(monkeypatch, H200, host=noise)
    _, stored = updated(2)
    assert len(stored["fp8_ms"]) == pairs


def test_a_pair_that_was_not_asked_for_busy_times_has_none_later(monkeypatch):
    """The host was quiet while the first two pairs ran: what later processes say is no answer for them."""
    install(monkeypatch, H200, busy=40.0)
    monkeypatch.setattr("pytest_fp8.arms.pool.ArmProcess", Waiting)
    Waiting.asked_busy = []
    pool = ArmPool(H200)
    arms = PairArms(Case("1b", "torchao", "tensorwise"), pool, None)
    arms.start()
    timer = BlockTimer(arms)
    monkeypatch.setattr(evidence, "launch_bound_arms", lambda account: ["FP8"] if len(timer.other) > 2 else [])
    found = [timing_of(arms, timer, look) for look in range(4)][-1]
    pool.close()
    assert [len(times) > 0 for times in found.fp8_busy] == [False, False, True, True]
    assert len(busy_ratios(found)) == 2
    assert len(set(Waiting.asked_busy)) == 4, "both arms of two pairs"
