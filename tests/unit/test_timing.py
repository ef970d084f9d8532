"""How blocks of two arms are taken: how long turns last, which pairs are taken again, what stands beside them; when
busy times are taken, stored and judged, since the host sets an arm's pace; and sessions with ``--fp8-base``."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
from functools import partial
from pathlib import Path
from random import Random
from typing import ClassVar

import pytest

from helpers.fakes import H200, FakeProcess, asks, install, timed
from pytest_fp8 import Case
from pytest_fp8.arms.pair import PairArms
from pytest_fp8.arms.pool import ArmPool
from pytest_fp8.codes import S
from pytest_fp8.compare import Comparison, with_base
from pytest_fp8.gpu import Conditions
from pytest_fp8.questions.speed.check import SpeedQuestion, check_speedup
from pytest_fp8.questions.speed.evidence import timing_for_baseline, timing_of
from pytest_fp8.questions.speed.timing import BlockTimer, unsteady_pair
from pytest_fp8.stats.components import MEASURED
from pytest_fp8.stats.looks import BASELINE_BLOCKS, GATE
from pytest_fp8.verdicts import Decision, Verdict

RECORDINGS = Path(__file__).parents[2] / "benchmarks" / "gate" / "recordings"


class PowerLimited(FakeProcess):
    """Each arm's first half second of a turn runs at the clocks that the other arm's power left."""

    sizes: ClassVar[list[tuple[int, int]]] = []

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


def arms_of(pool, model="8b", recipe="tensorwise"):
    arms = PairArms(Case(model, "torchao", recipe), pool, None)
    arms.start()
    return arms


# -- how long a turn lasts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prefix", "moves"), [("1b", False), ("8b-te", True)])
@pytest.mark.parametrize("blocks", [6, 12])
def test_recorded_turns_are_unsteady_at_8b_with_transformer_engine_and_never_at_1b(prefix, moves, blocks):
    for path in sorted(RECORDINGS.glob(f"{prefix}*.json")):
        for process in json.loads(path.read_text())["processes"]:
            assert unsteady_pair(process["bf16"][: 2 * blocks], process["fp8"][: 2 * blocks]) is moves, path.name


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


# -- pairs that are taken again ---------------------------------------------------------------------------------------

COOL, HOT = Conditions(1695), Conditions(1395, ("software thermal",))


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
    seen = itertools.chain(*readings, itertools.repeat(COOL))
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


# -- hosts that hold steps up -----------------------------------------------------------------------------------------


class Waiting(FakeProcess):
    """The GPU works 40 ms of each step of 100 ms in BF16, and 32 ms in FP8."""

    asked_busy: ClassVar[list[int]] = []

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


class LateWaiting(Waiting):
    """The host is quiet while some pairs are timed."""

    slow: tuple[int, ...] = ()
    """Pairs whose steps wait, the first one is 1."""

    def blocks(self, count, steps, dropped):
        waits = len(self.world.built) // 2 in self.slow
        return timed([100.0 if waits else self.works + 1] * count)

    def busy(self, steps):
        return {**super().busy(steps), "step_ms": [self.works + 1] * steps}


def run_on(monkeypatch, kind, seed=1, slow=(), **world):
    install(monkeypatch, H200, **{"busy": 40.0, **world})
    monkeypatch.setattr("pytest_fp8.arms.pool.ArmProcess", kind)
    monkeypatch.setattr(FakeProcess, "pids", itertools.count(10_000 * seed))
    monkeypatch.setattr(LateWaiting, "slow", slow)
    monkeypatch.setattr(Waiting, "asked_busy", [])


def asking(*given, **more):
    """What a question of the speed of a case of 1B decides, and its rows."""
    pool = ArmPool(H200)
    arms = arms_of(pool, "1b")
    decided = arms.run(lambda: SpeedQuestion(arms, *given, MEASURED, "file.json", 30, **more).decide(None))
    pool.close()
    return decided


def updated(processes, host_bound=False):
    """What an update decides and stores."""
    decision, rows = asking(host_bound, lambda _: [], processes=processes)
    return decision, {name: values for name, values, _ in rows}


# -- what an update stores --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "slow", "stored", "judged"),
    [
        (Waiting, (), False, True),
        (LateWaiting, (4,), False, True),
        (LateWaiting, (), False, False),
        (LateWaiting, (), True, True),
    ],
)
def test_an_update_has_busy_times_of_every_pair_and_judges_by_them_where_any_waits(
    monkeypatch, kind, slow, stored, judged
):
    """Seen with Transformer Engine at 1B: on one H200 the first of four pairs did not wait, on another the fourth alone
    did."""
    run_on(monkeypatch, kind, slow=slow)
    decision, rows = updated(4, host_bound=stored)
    assert [len(rows["speedup"]), len(rows["busy_speedup"])] == [4, 4]
    assert len(set(Waiting.asked_busy)) == 8, "both arms of each pair"
    assert (decision.numbers["on_busy"], decision.numbers["host_bound"]) == (judged, judged)
    account = decision.numbers["account"]
    assert rows["speedup_limit"] == [account["busy_limit" if judged else "limit"]]
    assert [rows["earned_ms"], rows["casts_ms"]] == [[account["earned_ms"]], [account["casts_ms"]]]


@pytest.mark.parametrize("waits", [True, False])
def test_arms_that_take_turns_have_the_busy_times_of_their_profile(pool, monkeypatch, waits):
    """Others would cost a build of each."""
    run_on(monkeypatch, Waiting if waits else FakeProcess, busy=40.0 if waits else 99.0, kernels_alone=True)
    arms = arms_of(pool, "1b")
    pool.separate(*arms.pair)
    taken = arms.run(lambda: timing_for_baseline(arms, BlockTimer(arms, takes_busy=True), 2))
    assert arms.takes_turns
    assert [len(times) for times in taken.fp8_busy] == [5, 0]
    assert [len(times) for times in taken.fp8] == [2 * BASELINE_BLOCKS] * 2, "more than a gate takes"


def test_steps_without_kernels_of_their_own_give_no_busy_times(monkeypatch):
    run_on(monkeypatch, FakeProcess)  # it waits; its profile has no steps of kernels alone
    assert "busy_speedup" not in updated(2)[1]


# -- what a gate asks -------------------------------------------------------------------------------------------------


def test_a_gate_takes_busy_times_from_the_first_pair_that_waits(pool, monkeypatch):
    """A later pair that does not wait changes nothing of what an earlier one showed."""
    run_on(monkeypatch, LateWaiting, slow=(2,))
    arms = arms_of(pool, "1b")
    timer = BlockTimer(arms)
    taken = [arms.run(partial(timing_of, arms, timer, look)) for look in range(len(GATE.pairs))][-1]
    assert [bool(times) for times in taken.fp8_busy] == [False, True, True, True]
    assert taken.host_bound, "which all blocks together need not show"


BOTH, STEPS = ("speedup", "bf16_ms", "busy_speedup"), ("speedup", "bf16_ms")


@pytest.mark.parametrize(
    ("kept", "slower", "verdict"), [(BOTH, 1.0, Verdict.PASS), (BOTH, 1.2, Verdict.FAIL), (STEPS, 1.0, Verdict.INVALID)]
)
def test_a_baseline_of_a_quiet_host_is_asked_on_a_slow_one(monkeypatch, kept, slower, verdict):
    """Seen at 8B with Transformer Engine on an H200: stored at 1.254x of steps on a quiet host, four pairs of processes
    at 1.03x to 1.28x on a busy one decided nothing."""
    run_on(monkeypatch, LateWaiting)
    _, stored = updated(4)
    run_on(monkeypatch, LateWaiting, slow=(1, 2, 3, 4))
    monkeypatch.setattr(LateWaiting, "works", property(lambda self: 32.0 * slower if self.is_fp8 else 40.0))
    decision, _ = asking(False, lambda name: [stored[name]] if name in kept else [])
    assert decision.verdict is verdict, decision.message
    assert decision.numbers["on_busy"] is (kept is BOTH)


# -- sessions with ``--fp8-base``, with fake arms ----------------------------------------------------------------------


def git(folder, *commands):
    for command in commands:
        subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@example.org", *command], check=True, cwd=folder)


FP8 = ("head", "fp8")
IN_TESTS = f"""
    import pytest
    from pytest_fp8 import Case

    CASES = [Case("1b", "torchao", "tensorwise")]
{asks("speedup", "layers")}"""


@pytest.fixture
def session(pytester, monkeypatch):
    """A session held against a base that is the same commit; fake arms tell the two sides apart by name."""
    pytester.makepyfile(IN_TESTS)
    git(pytester.path, ["init", "-q"], ["add", "*.py"], ["commit", "-qm", "base"])

    def call(*arguments, **world):
        install(monkeypatch, H200, **world)
        return pytester.runpytest("--fp8-gpu=h200", *(arguments or ("--fp8-base=HEAD",)))

    return call


def test_base_is_the_commit_that_its_name_meant_at_the_start_and_is_told(session, pytester):
    moves = "def test_a_colleague_pulls():\n    subprocess.run(['git', 'tag', '-f', 'base', 'HEAD'], check=True)\n"
    pytester.makepyfile(test_1_moves=f"import subprocess\n\n{moves}")
    git(pytester.path, ["tag", "base"])
    before = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=pytester.path, text=True).strip()
    git(pytester.path, ["commit", "-qm", "head", "--allow-empty"])
    result = session("--fp8-base=base")
    assert result.ret == 0
    result.stdout.fnmatch_lines([f"timed beside the base base: commit {before[:12]}; *", "*3 passed*"])


@pytest.mark.parametrize("strict", [False, True])
def test_a_base_that_no_test_asks_the_speed_of_is_noted(session, strict):
    result = session("--fp8-base=HEAD", "-k", "not speedup", *["--fp8-strict"] * strict)
    assert result.ret == strict
    says = "FP8-R48: nothing was timed beside the base HEAD: no test that ran asked assert_speedup(), *"
    result.stdout.fnmatch_lines([says, "*1 passed*"])


SLOWER = ["*FAIL FP8-S23: head is slower than base in FP8*", "*at most 1.0% slower than base's*"]


@pytest.mark.parametrize(
    ("world", "failed", "says"),
    [
        ({"slower": {FP8: 0.02}}, 1, SLOWER),
        ({"slower": {FP8: 0.005}}, 0, []),
        ({"slower": {("base", "fp8"): 0.06}}, 0, []),
        # A head without FP8 fails however fast.
        ({"slower": {("base", "fp8"): 0.06}, "executed_roles": ("fprop",)}, 2, ["*FAIL FP8-L*: in head *"]),
    ],
)
def test_a_test_session_fails_what_is_slower_than_base(session, world, failed, says):
    result = session(**world)
    result.assert_outcomes(passed=2 - failed, failed=failed)
    result.stdout.fnmatch_lines(says)


def test_the_stored_baseline_stays_behind_base_as_the_coarse_guard(session):
    assert session("--fp8-update=first").ret == 0
    crept = session("--fp8-base=HEAD", "-k", "speedup", speedup=1.05)
    crept.assert_outcomes(failed=1, deselected=1)
    crept.stdout.fnmatch_lines(["*FAIL FP8-S03: FP8 lost speed against BF16 since the baseline*"])


@pytest.mark.parametrize(("code", "verdict"), [(S.OTHER_REFERENCE, Verdict.PASS), (S.OTHER_PROCESS, Verdict.INVALID)])
def test_on_another_host_the_comparison_with_base_answers_alone(code, verdict):
    stored = Decision(code, Verdict.INVALID, "why", question="speedup")
    compared = Comparison(Decision(None, Verdict.PASS, "as fast as base's", question="same session"))
    assert with_base(stored, compared).verdict is verdict
