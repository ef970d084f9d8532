"""The speed and the memory question: what is decided of step times, busy times and peaks, recorded on an H200 or
written by hand, and the account. `tests/words/test_words.py` has evidence for each code of speed."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from helpers.evidence import verdict_of
from helpers.steps import (
    BF16,
    DELAYED,
    FP8_ARM,
    NOISE,
    TIMED,
    asked,
    changed,
    decided,
    gpu_step,
    profiled,
    recorded_step,
    sessions,
    sleeping,
    travelling,
    with_products,
)
from pytest_fp8 import Verdict
from pytest_fp8.codes import M, S
from pytest_fp8.gpu import Conditions
from pytest_fp8.questions.layers.evidence import KernelTime
from pytest_fp8.questions.layers.products import FP8, Product
from pytest_fp8.questions.memory import MemoryEvidence, StepMemory, check_memory
from pytest_fp8.questions.speed.account import account_of, covered_by_fp8
from pytest_fp8.questions.speed.evidence import TimingEvidence
from pytest_fp8.questions.speed.timing import Beside, Turn, scatters
from pytest_fp8.report.table import stored_of
from pytest_fp8.stats.components import MEASURED
from pytest_fp8.stats.looks import GATE

RECORDINGS = Path(__file__).parents[2] / "benchmarks" / "gate" / "recordings"
PASS, FAIL, INVALID, INCONCLUSIVE = Verdict.PASS, Verdict.FAIL, Verdict.INVALID, Verdict.INCONCLUSIVE
TE = recorded_step("1b-transformer_engine-current")


def plain(fp8_ms=80.0, floor=None, bf16_ms=100.0, **more):
    """Arms of which nothing was profiled."""
    return asked(None, None, bf16_ms, fp8_ms, floor, **more)


def busy_of(bf16, fp8):
    """Milliseconds that the GPU works in each step of two processes."""
    return {"bf16_busy": [[bf16 * x for x in NOISE[:5]]] * 2, "fp8_busy": [[fp8 * x for x in NOISE[:5]]] * 2}


def launch_bound(fp8_busy, **more):
    """Transformer Engine on a slow host, with so many busy milliseconds a step in each of two processes."""
    return asked(fp8=profiled(TE, 210.0, fp8_busy), fp8_ms=206.0, **busy_of(113.0, fp8_busy), **more)


def recomputing():
    """A reference that recomputes a third of its products."""
    again = [replace(p, phase="recompute") for p in BF16.products if p.phase == "forward" and p.milliseconds > 0.1]
    return asked(with_products(BF16, *again), bf16_ms=121.5 + sum(product.milliseconds for product in again))


def in_float32_both():
    product = Product("forward", 512, (2048, 4096), "float32", "mm", milliseconds=50.0)
    return asked(*(with_products(arm, product) for arm in (BF16, FP8_ARM)), 171.5, 156.0)


def hidden_products():
    """A library's own kernels for grouped products, say: their time is among all other kernels."""
    spent = FP8_ARM.milliseconds["fp8 products"]
    hidden = changed(FP8_ARM, fp8_products=0.0, rest=FP8_ARM.milliseconds["rest"] + spent)
    return asked(fp8=replace(hidden, products=[product for product in FP8_ARM.products if product.kind != FP8]))


def both_slower(*stored):
    return plain(88.0, bf16_ms=110.0, history=sessions(1.25), baseline_reference_ms=stored, tolerance=0.03)


def other_attention():
    fp8 = gpu_step({}, attention={"cudnn": ["cudnn_flash"]})
    return asked(None, fp8, bf16_cudnn=91900, fp8_cudnn=91400)


def sending(*milliseconds, fp8_ms=110.0, **how):
    """Arms on two ranks, of which FP8's sends for so many milliseconds."""
    return asked(travelling(BF16, 24.0, 12.0, 8.0), travelling(FP8_ARM, *milliseconds, **how), 129.5, fp8_ms)


WAITS = {"waits": {"cudaStreamSynchronize": 3}}
FAST_KERNELS = {"floor": None, "history": sessions(0.59), "busy_history": sessions(1.154)}

DECIDED = [  # decision, verdict, code, what the message says
    (lambda: plain(floor=1.0), PASS, None, "1.250x"),
    # A young baseline gates coarsely, and one of many cases holds against more of them.
    (lambda: plain(history=sessions(1.25, 1)), PASS, None, "(its 1 session(s) cannot hold 2%)"),
    (lambda: plain(history=sessions(1.29), cases=1), FAIL, S.SLOWER_THAN_BASELINE, ""),
    (lambda: plain(history=sessions(1.29), cases=10_000), INCONCLUSIVE, None, ""),
    # Both arms slower are no regression of FP8: BF16 takes 110 ms here.
    (lambda: both_slower([97.0], [100.2]), INVALID, S.OTHER_REFERENCE, "97.00 to 100.20 ms a step +-8%, as in 2"),
    (lambda: both_slower([103.5]), PASS, None, ""),
    (other_attention, INVALID, S.OTHER_ATTENTION, "two cuDNN libraries: 91900"),
    # Other work.
    (lambda: asked(fp8=changed(FP8_ARM, optimizer=0.0), fp8_ms=99.5), INVALID, S.LESS_WORK, "optimizer: 6.5 ms a step"),
    (recomputing, INVALID, S.LESS_WORK, "no recomputation in the FP8 arm"),
    (in_float32_both, PASS, None, ""),
    (hidden_products, PASS, None, ""),
    (lambda: asked(replace(BF16, **WAITS), bf16_ms=160.0), INVALID, S.REFERENCE_WAITS, ".item()"),
    (lambda: asked(replace(BF16, **WAITS), replace(FP8_ARM, **WAITS)), PASS, None, ""),
    (lambda: asked(fp8=profiled(FP8_ARM, 100.0, 99.0), bf16_ms=160.0), INVALID, S.REFERENCE_WAITS, "a sleep"),
    (lambda: asked(beside=Beside(turns=[Turn("BF16"), Turn("FP8")])), PASS, None, ""),
    # Busy times at other clocks hide no reference that sleeps: at clocks 6 % higher that would seem to be 8 %.
    (lambda: sleeping(**busy_of(113.0 * 0.94, 95.6 * 0.94)), INVALID, S.REFERENCE_WAITS, ""),
    # Weights gathered in FP8 are as many numbers; sending less is not.
    (lambda: sending(8.0, 12.0, 4.0, dtype="uint8", size=1), PASS, None, ""),
    (lambda: sending(8.0, 5.0, 2.0, fp8_ms=108.0, elements=10**9 // 3), INVALID, S.LESS_WORK, "the FP8 arm sends less"),
    # A step that takes longer than BF16's is not faster though its kernels are: the floor is the user's question.
    (lambda: launch_bound(98.0), FAIL, S.LAUNCH_BOUND, "in its work alone FP8 is 1.15x"),
    (lambda: launch_bound(120.0, **FAST_KERNELS), FAIL, None, "of busy time"),
    (
        lambda: asked(floor=None, host_bound=True, **busy_of(113.0, 99.4)),
        Verdict.NOT_EXERCISED,
        S.NO_BASELINE,
        "of busy time, since the host held up steps",
    ),
]


@pytest.mark.parametrize(("decision", "verdict", "code", "says"), DECIDED)
def test_what_is_decided(decision, verdict, code, says):
    found = decision()
    verdict_of(found, verdict, says)
    assert code is None or found.code is code


def test_a_pass_says_what_was_not_watched_and_what_a_baseline_cannot_hold():
    unwatched = plain(floor=1.0, beside=Beside([Conditions(unknown=("clocks", "other processes"))]))
    verdict_of(unwatched, PASS, "not watched on this GPU: clocks, other processes")
    assert any("not watched" in note for note in unwatched.numbers["notes"])
    assert "not watched" not in plain(floor=1.0).message
    young = plain(history=sessions(1.25, 1))
    assert (young.numbers["tolerance"] > 0.02, young.numbers["sessions"]) == (True, 1)
    assert "cannot hold" not in plain(history=sessions(1.25, 1), tolerance=0.05).message


# -- the account ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bf16", "fp8", "fp8_ms"),
    [
        ("1b-bf16", "1b-torchao-tensorwise", 106.0),
        ("1b-bf16", "1b-transformer_engine-current", 104.0),
        ("8b-bf16", "8b-torchao-tensorwise", 299.0),
    ],
)
def test_a_healthy_pair_reaches_a_part_of_its_limit_and_its_parts_sum_to_the_difference(bf16, fp8, fp8_ms):
    steps = recorded_step(bf16), recorded_step(fp8)
    found = account_of(*steps, [TIMED[bf16]], [fp8_ms])
    assert 0.4 < found.reached() < 0.75
    assert 1.7 < found.covered / found.in_fp8 < 2.0, "FP8's own gain, below the ratio of the peak rates"
    assert -found.earned + found.casts + found.all_else == pytest.approx(found.fp8.step - found.bf16.step)
    for arm in (found.bf16, found.fp8):
        assert arm.busy + arm.idle == pytest.approx(arm.step)
        assert sum(arm.classes.values()) == pytest.approx(arm.busy, rel=0.02)
    decision = asked(*steps, TIMED[bf16], fp8_ms)
    verdict_of(decision, PASS, "products in FP8 earned", "of it reached", "idle")
    numbers = decision.numbers["account"]
    assert numbers["limit"] == pytest.approx(found.limit)
    assert json.loads(json.dumps(numbers)) == numbers


def test_a_slow_arm_s_casts_are_named_by_their_kernels():
    before = replace(BF16, rest=[KernelTime("norm", 32, 9.0), KernelTime("rope", 32, 4.0)])
    after = replace(FP8_ARM, rest=[KernelTime("copy<uint8>", 96, 41.0), KernelTime("norm", 32, 12.0)])
    decision = asked(before, after, floor=1.25)
    verdict_of(decision, FAIL, "copy<uint8> +", " ms in 96, not in BF16's step; norm +", " ms in 32")
    grown = decision.numbers["account"]["grown"]
    assert [kernel["name"] for kernel in grown] == ["copy<uint8>", "norm"], "rope is no longer than it was"


def test_ranks_that_wait_for_each_other_while_they_are_profiled_are_no_other_work():
    """As with Transformer Engine on two H200s: collectives waited for 100 ms in the profiled step of the FP8 arm, and
    for 5 ms in steps that follow each other. Attention took what it takes in BF16."""
    works = FP8_ARM.milliseconds["busy"]
    fp8 = replace(profiled(travelling(FP8_ARM, 115.0, 10.0, 105.0), 112.0, 109.0), compute_ms=[works] * 5)
    decision = asked(travelling(BF16, 20.0, 8.0, 4.0), fp8, 125.5, 110.0)
    verdict_of(decision, PASS)
    account = decision.numbers["account"]["fp8"]
    assert account["classes"]["attention"] == pytest.approx(FP8_ARM.milliseconds["attention"], rel=0.03)
    assert account["wire"]["exposed"] == pytest.approx(account["busy"] * (1 - works / 109.0)), "not the 105 ms"


def test_products_are_covered_by_their_size_and_what_is_fused_by_its_flops():
    def product(kind, outer, ms):
        return Product("forward", 8, outer, kind, "mm", milliseconds=ms)

    fp8, one, head = product(FP8, (4, 16), 0.6), product("bfloat16", (4, 16), 1.0), product("bfloat16", (4, 100), 9.0)
    assert covered_by_fp8([one, one, head], [fp8, one, head]) == (1, 0.6)
    assert covered_by_fp8([one, one, head], [product(FP8, (4, 32), 1.1), head]) == (2.0, 1.1)
    assert covered_by_fp8([head], [head, fp8]) == (0, 0), "FP8 that BF16 has no product for"


@pytest.mark.slow
@pytest.mark.parametrize("draws", [1, pytest.param(20, marks=pytest.mark.nightly)])
def test_recorded_noise_raises_no_false_alarm(draws):
    """Every process that was recorded on an H200, and blocks drawn anew from it, under its model's profile."""
    random = np.random.default_rng(0)
    alarms, drawn = [], 0
    for path in sorted(RECORDINGS.glob("*.json")):
        data = json.loads(path.read_text())
        model, _, recipe = data["case"].partition("-")
        fp8 = "transformer_engine-delayed" if "delayed" in recipe else "transformer_engine-current"
        if "torchao" in recipe or model == "8b":
            fp8 = "torchao-tensorwise"
        fp8 = "bf16" if recipe == "bf16" else fp8
        steps = {"bf16_step": recorded_step(f"{model}-bf16"), "fp8_step": recorded_step(f"{model}-{fp8}")}
        for process in data["processes"]:
            count = min(len(process["bf16"]), len(process["fp8"])) // 2 * 2
            for _ in range(draws):
                chosen = 2 * random.integers(0, count // 2, size=6)
                taken = {arm: [[process[arm][i + j] for i in chosen for j in (0, 1)]] for arm in ("bf16", "fp8")}
                decision = decided(TimingEvidence(**taken, **steps))
                drawn += 1
                if decision.verdict is INVALID:
                    alarms.append((path.name, decision.message))
    assert drawn > 50 * draws
    assert alarms == []


# -- busy times -------------------------------------------------------------------------------------------------------


def test_a_launch_bound_step_is_gated_on_busy_time():
    decision = launch_bound(98.0, **FAST_KERNELS)
    verdict_of(decision, PASS, "1.154x", "of busy time, since the host", "0.590x of step time")
    assert stored_of(decision.numbers) == "(1.154 busy)"
    [note] = decision.numbers["notes"]
    assert note.startswith("speedup judged: 1.15")
    known = replace(MEASURED, sessions=60, busy_sessions=60)
    like_steps, apart = (
        launch_bound(98.0, **FAST_KERNELS, components=replace(known, busy=busy)) for busy in (known.session, 0.009)
    )
    assert apart.numbers["tolerance"] > 2 * like_steps.numbers["tolerance"], "held against what busy times differ by"


@pytest.mark.parametrize("busy", [116.0, 110.0])
def test_steps_that_answer_are_asked_whatever_busy_times_say(busy):
    """BF16 idles 14 % of its step and FP8 6 to 11 %: the GPU works longer in FP8, and the user's step is faster."""
    arms = {"bf16": profiled(BF16, 132.0, 113.0), "fp8": profiled(TE, 123.0, busy)}
    proven = asked(**arms, bf16_ms=132.0, fp8_ms=123.0, **busy_of(113.0, busy))
    verdict_of(proven, PASS, "1.073x")
    stored_of_steps = launch_bound(98.0, floor=None, history=sessions(0.59))
    verdict_of(stored_of_steps, PASS)
    assert [d.numbers["on_busy"] for d in (proven, stored_of_steps, launch_bound(98.0))] == [False] * 3


def test_what_timed_steps_wait_is_no_work_though_the_profiled_ones_met_a_quiet_host():
    """The profiled steps wait 2 ms and the timed ones 29: without busy times that were asked beside these, the GPU
    seems to work 123 ms of them, and the speedup of busy time to be too good to be true."""
    works = {"bf16_busy": [[120.0] * 26] * 2, "fp8_busy": [[0.0] * 14 + [96.0] * 12] * 2}
    steps = {"bf16_step": BF16, "fp8_step": profiled(DELAYED, 97.6, 95.6)}
    evidence = TimingEvidence([[121.5] * 12] * 2, [[118.0, 125.0, 132.0] * 4] * 2, **steps, **works)
    account = evidence.account()
    assert (account.fp8.idle, account.fp8.busy) == pytest.approx((29.0, 96.0))
    assert replace(evidence, bf16_busy=(), fp8_busy=()).account().fp8.idle == pytest.approx(2.0)
    decision = decided(evidence, None, history=sessions(0.97), busy_history=sessions(1.25))
    verdict_of(decision, PASS, "1.250x", "and 96.00 ms of it")


def test_a_step_that_the_profiler_lost_is_left_out():
    taken = TimingEvidence([[1.0]], [[1.0]], bf16_busy=[[40.0, 0.0, 40.0], [0.0]], fp8_busy=[[32.0, 32.0, 0.0], [32.0]])
    assert taken.busy_ratios() == [[pytest.approx(math.log(40 / 32))]]


@pytest.mark.parametrize(("retries", "memory"), [(12, True), (1, False)])
def test_an_arm_that_waits_for_memory_is_told_so_and_not_of_its_host(retries, memory):
    """An arm alone on its GPU, whose step has no room for its tensors: no other arm is in its way."""
    for arm, other, decide in (("BF16", "FP8", sleeping), ("FP8", "BF16", partial(launch_bound, 120.0))):
        turns = [Turn(arm, steps=6, retries=retries), Turn(other, retries=99 * (arm == "FP8")), Turn(arm, steps=6)]
        decision = decide(beside=Beside(turns=turns))
        assert decision.verdict is (INVALID if arm == "BF16" else FAIL)
        assert (f"too little memory for a step of {arm}'s arm" in decision.cause) is memory


STORED = {"history": [[[0.143, 0.144] * 4] * 2], "busy_history": [[[0.1815, 0.1816] * 15] * 2]}
"""A baseline of 300 ms in BF16 and 260 in FP8, of which the GPU works 240 and 200."""


@pytest.mark.parametrize(("late", "change", "works"), [(1, FAIL, 1.07), (0, Verdict.IMPROVED, 0.93)])
@pytest.mark.parametrize("moved", [True, False], ids=["the GPU's", "the host's"])
def test_busy_time_tells_a_change_from_a_host_that_holds_blocks_up(late, change, works, moved):
    blocks = [[300.0] * 12, [260.0] * 12]
    blocks[late] = [time * (1.05 + 0.03 * (index % 4 > 1)) for index, time in enumerate(blocks[late])]
    busy = 200.0 * (works if moved else 1.0)
    gpu = {"bf16_busy": [[240.0, 242.0] * 15] * 4, "fp8_busy": [[busy, 1.01 * busy] * 15] * 4}
    decision = decided(TimingEvidence([blocks[0]] * 4, [blocks[1]] * 4, **gpu), None, **STORED)
    assert decision.verdict is (change if moved else PASS)
    assert decision.numbers["on_busy"]
    one = {"bf16_busy": [[], *gpu["bf16_busy"][:1]], "fp8_busy": [[], [230.0, 232.0] * 15]}
    alone = decided(TimingEvidence([blocks[0]] * 2, [blocks[1]] * 2, **one), None, **STORED)
    assert alone.verdict is INCONCLUSIVE, "busy times of one pair alone fail nothing"


def gate(rng, lost=0.0, busy_stored=True):
    """One of a gate's 30 cases, look by look, on a host like that of an H100 which held up all blocks of FP8 in a
    process by up to 2 %, and a third of them by up to a fifth. Busy times are as far from the stored ones as sessions
    are."""
    between = rng.normal(0, MEASURED.busy)
    stored = {"history": [rng.normal(0.15, MEASURED.block, (2, 8)).tolist()]}
    busy_history = [rng.normal(rng.normal(0.19, MEASURED.busy), 0.02, (2, 30)).tolist()]
    bf16, fp8, busy = [], [], []
    blocks = GATE.blocks
    for processes in GATE.pairs:
        while len(fp8) < processes:
            late = (rng.random(2 * blocks) < 0.33) * rng.uniform(0, 0.2, 2 * blocks) + rng.uniform(0, 0.02)
            bf16.append((300 * np.exp(rng.normal(0, MEASURED.block, 2 * blocks))).tolist())
            fp8.append((300 * np.exp(rng.normal(lost - 0.15, MEASURED.block, 2 * blocks)) * (1 + late)).tolist())
            busy.append((240 * np.exp(rng.normal(lost - 0.19 + between, 0.02, 30))).tolist())
        taken = [any(map(scatters, bf16[: index + 1], fp8[: index + 1])) for index in range(processes)]
        works = {
            "bf16_busy": [[240.0] * 30 if each else [] for each in taken],
            "fp8_busy": [busy[index] if each else [] for index, each in enumerate(taken)],
        }
        evidence = TimingEvidence(bf16, fp8, **works)
        decision = decided(evidence, None, **stored, busy_history=busy_history if busy_stored else ())
        if decision.verdict is not INCONCLUSIVE:
            break
    return decision.verdict


def test_on_such_a_host_a_healthy_case_passes_and_a_loss_that_busy_times_hold_is_caught():
    def gates(lost, **how):
        return Counter(gate(np.random.default_rng(seed), lost, **how) for seed in range(100))

    healthy, slower = gates(0.0), gates(0.08)
    assert healthy[PASS] >= 94
    assert healthy[FAIL] <= 1
    assert (slower[FAIL] >= 94, slower[PASS]) == (True, 0)
    assert gates(0.0, busy_stored=False)[FAIL] == 0, "nor without busy times to ask"


# -- peaks of memory ---------------------------------------------------------------------------------------------------


def memory(peak, resident=50, phase="forward"):
    return StepMemory(resident, {phase: peak}, peak_allocated=peak, peak_reserved=peak)


def test_memory():
    evidence = MemoryEvidence(bf16=memory(100), fp8=memory(90))
    verdict_of(check_memory(evidence, 0.9), Verdict.PASS)
    verdict_of(check_memory(evidence), Verdict.NOT_EXERCISED)
    verdict_of(check_memory(replace(evidence, fp8=memory(80)), 0.9), Verdict.IMPROVED, M.LESS_MEMORY)
    verdict_of(check_memory(replace(evidence, fp8=memory(166)), 0.9), Verdict.FAIL, M.MORE_MEMORY)


def test_activations_are_described_and_decide_nothing():
    less = check_memory(MemoryEvidence(bf16=memory(100), fp8=memory(90, resident=70)), 0.9)
    verdict_of(less, Verdict.PASS)
    assert less.numbers["activation_ratio"] == pytest.approx(20 / 50)
    no_forward = memory(90, phase="backward")
    assert check_memory(MemoryEvidence(memory(100), no_forward), 0.9).figures.activation_ratio is None


def test_the_peaks_differ_for_a_reason():
    gib = 2**30
    bf16 = replace(memory(10 * gib), peak_reserved=12 * gib, kinds={"weights": 4 * gib, "activations": 6 * gib})
    kinds = {"weights": 4 * gib, "activations": 3 * gib, "FP8 copies": gib, "other": gib // 16}
    fp8 = replace(memory(int(8.0625 * gib)), kinds=kinds)
    decision = check_memory(MemoryEvidence(bf16, fp8), 0.8)
    assert "FP8 8.06 GiB (in forward), BF16 10.00 GiB" in decision.message
    assert "at the peaks: activations -3.00 GiB, FP8 copies +1.00 GiB;" in decision.message
    assert [decision.numbers[f"{arm}_peak_gib"] for arm in ("bf16", "fp8")] == [10.0, 8.0625]
    for told, arm in (("kinds", "fp8"), ("bf16_kinds", "bf16")):
        gibs = dict(decision.numbers[told])
        cache = gibs.pop("cache")
        assert sum(gibs.values()) == pytest.approx(decision.numbers[f"{arm}_peak_gib"])
    assert cache == 2.0
    assert "no kind by 1% of BF16's" in check_memory(MemoryEvidence(bf16, bf16), 1.0).message
    assert "at the peaks" not in check_memory(MemoryEvidence(bf16, memory(gib)), 1.0).message
