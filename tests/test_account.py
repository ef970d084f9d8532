"""The account of a speedup, on steps recorded on an H200: healthy pairs, and speedups that are not FP8's own."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from helpers.evidence import verdict_of
from helpers.steps import TIMED, changed, on_half_the_rows, recorded_step, with_products
from pytest_fp8 import Verdict
from pytest_fp8.questions.layers.evidence import KernelTime
from pytest_fp8.questions.layers.products import FP8, LayerCall, Product
from pytest_fp8.questions.speed.account import GpuStep, account_of
from pytest_fp8.questions.speed.check import check_speedup
from pytest_fp8.questions.speed.coverage import covered_by_fp8, role_times
from pytest_fp8.questions.speed.evidence import TimingEvidence
from pytest_fp8.questions.speed.host import Turn
from pytest_fp8.report.cells import baseline_of
from pytest_fp8.rules.variance import MEASURED

BF16, FP8_ARM = recorded_step("1b-bf16"), recorded_step("1b-torchao-tensorwise")
NOISE = [0.999, 1.001, 1.0, 1.002, 0.998, 1.0] * 2
HEALTHY = [
    ("1b-bf16", "1b-torchao-tensorwise", 106.0),
    ("1b-bf16", "1b-transformer_engine-current", 104.0),
    ("1b-bf16", "1b-transformer_engine-delayed", 100.0),
    ("8b-bf16", "8b-torchao-tensorwise", 299.0),
]
RECORDINGS = Path(__file__).parent.parent / "benchmarks" / "gate" / "recordings"
STORED = ("history", "busy_history")


def sessions(speedup):
    """Four stored sessions of four processes, all of this speedup."""
    return [[[math.log(speedup)] * 8] * 4] * 4


def asked(bf16=BF16, fp8=FP8_ARM, bf16_ms=121.5, fp8_ms=106.0, floor=1.0, **more):
    """The decision on these steps, timed at these milliseconds in two processes."""
    check = {name: more.pop(name) for name in (*STORED, "components") if name in more}
    blocks = {"bf16": [[bf16_ms * x for x in NOISE]] * 2, "fp8": [[fp8_ms * x for x in reversed(NOISE)]] * 2}
    evidence = TimingEvidence(**blocks, bf16_gpu=bf16, fp8_gpu=fp8, **more)
    return check_speedup(evidence, floor=floor, tolerance=0.02, **check)


def account(bf16, fp8, fp8_ms):
    found = account_of(recorded_step(bf16), recorded_step(fp8), [TIMED[bf16]], [fp8_ms])
    assert found is not None
    return found


# -- the account ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bf16", "fp8", "fp8_ms"), HEALTHY)
def test_a_healthy_pair_reaches_a_part_of_its_limit(bf16, fp8, fp8_ms):
    found = account(bf16, fp8, fp8_ms)
    assert 0.4 < found.reached() < 0.75
    assert 1.7 < found.covered / found.in_fp8 < 2.0, "FP8's own gain, below the ratio of the peak rates"
    decision = asked(recorded_step(bf16), recorded_step(fp8), TIMED[bf16], fp8_ms)
    verdict_of(decision, Verdict.PASS, "products in FP8 earned", "of it reached", "idle")
    assert decision.numbers["account"]["limit"] == pytest.approx(found.limit)


def test_a_slow_arm_s_casts_are_named_by_their_kernels():
    before = replace(BF16, rest=[KernelTime("norm", 32, 9.0), KernelTime("rope", 32, 4.0)])
    after = replace(FP8_ARM, rest=[KernelTime("copy<uint8>", 96, 41.0), KernelTime("norm", 32, 12.0)])
    decision = asked(before, after, floor=1.25)
    verdict_of(decision, Verdict.FAIL, "copy<uint8> +", " ms in 96, not in BF16's step; norm +", " ms in 32")
    grown = decision.numbers["account"]["grown"]
    assert [kernel["name"] for kernel in grown] == ["copy<uint8>", "norm"], "rope is no longer than it was"


def with_reduction(milliseconds, name="triton_per_fused__scaled_mm__to_copy_add_clamp_clone"):
    """The recorded FP8 arm with a reduction of the compiler's that takes so long."""
    return replace(FP8_ARM, rest=[*FP8_ARM.rest, KernelTime(name, 16, milliseconds)])


@pytest.mark.parametrize("floor", [1.0, 1.25])
def test_a_fused_reduction_that_takes_long_is_told_whether_fp8_is_fast_enough_or_not(floor):
    decision = asked(fp8=with_reduction(8.0), floor=floor)
    [note] = decision.numbers["notes"]
    assert "triton_per_fused__scaled_mm__to_copy_add_clamp_clone, takes 8." in note
    assert note.endswith("try TORCHINDUCTOR_MIX_ORDER_REDUCTION=0")
    assert (note in decision.message) is (decision.verdict is Verdict.FAIL)


@pytest.mark.parametrize(
    "arms",
    [
        {},
        {"fp8": with_reduction(1.0)},
        {"fp8": with_reduction(8.0, "triton_red_fused__scaled_mm_")},
        {"fp8": with_reduction(8.0), "bf16": replace(BF16, rest=with_reduction(8.0).rest)},
    ],
    ids=["none", "short", "another", "in_both"],
)
def test_no_other_kernel_is_told_as_a_fused_reduction(arms):
    decision = asked(**arms, floor=1.25)
    assert decision.numbers["notes"] == []
    assert "MIX_ORDER" not in decision.message


@pytest.mark.parametrize(("bf16", "fp8", "fp8_ms"), HEALTHY)
def test_the_parts_of_the_difference_sum_to_it(bf16, fp8, fp8_ms):
    found = account(bf16, fp8, fp8_ms)
    difference = -found.earned + found.casts + found.all_else
    assert difference == pytest.approx(found.fp8.step - found.bf16.step)
    for arm in (found.bf16, found.fp8):
        assert arm.busy + arm.idle == pytest.approx(arm.step)
        assert sum(arm.classes.values()) == pytest.approx(arm.busy, rel=0.02)


def test_the_limit_is_amdahls():
    found = account("1b-bf16", "1b-torchao-tensorwise", 106.0)
    share, gain = found.covered / found.bf16.step, found.covered / found.in_fp8
    assert found.limit == pytest.approx(1 / (1 - share * (1 - 1 / gain)))


def test_the_report_holds_the_account_as_plain_data():
    numbers = asked().numbers["account"]
    assert json.loads(json.dumps(numbers)) == numbers
    assert numbers["fp8"]["classes"]["fp8 products"] > 0


def test_without_a_profile_there_is_no_account():
    decision = asked(bf16=GpuStep())
    assert decision.numbers["account"] is None
    verdict_of(decision, Verdict.PASS, "1.146x")


def test_roles_that_share_their_extents_share_the_time():
    """16 tokens: dgrad of 32 -> 16 features and wgrad of it have one size."""
    call = LayerCall("a", 32, 16, rows=16)
    products = [
        Product("forward", 32, (16, 16), FP8, "mm", milliseconds=1.0),
        Product("backward", 16, (16, 32), FP8, "mm", milliseconds=2.0),
        Product("backward", 16, (32, 16), FP8, "mm", milliseconds=2.0),
        Product("forward", 7, (9, 9), "float32", "bmm", milliseconds=0.5),
    ]
    assert role_times(products, [call], recompute=False) == {
        "fprop fp8": 1.0,
        "dgrad fp8": 2.0,
        "wgrad fp8": 2.0,
        "other float32": 0.5,
    }


def test_products_are_covered_by_their_size_and_what_is_fused_by_its_flops():
    def product(kind, inner, outer, ms):
        return Product("forward", inner, outer, kind, "mm", milliseconds=ms)

    head = [product("bfloat16", 8, (4, 100), 9.0)]
    apart = [product("bfloat16", 8, (4, 16), 1.0), product("bfloat16", 8, (4, 16), 1.0), *head]
    assert covered_by_fp8(apart, [product(FP8, 8, (4, 16), 0.6), product("bfloat16", 8, (4, 16), 1.0), *head]) == (
        1,
        0.6,
    )
    fused = [product(FP8, 8, (4, 32), 1.1), *head]
    assert covered_by_fp8(apart, fused) == (2.0, 1.1)
    assert covered_by_fp8(head, [*head, product(FP8, 8, (4, 16), 0.6)]) == (0, 0), "FP8 that BF16 has no product for"


# -- what is not FP8's ------------------------------------------------------------------------------------------------


def test_half_the_batch_is_other_work():
    half = on_half_the_rows(FP8_ARM, rows=8192)
    decision = asked(fp8=half, fp8_ms=62.0)
    verdict_of(
        decision,
        Verdict.INVALID,
        "do not do the same work",
        "attention: 13.5 ms a step in BF16, 6.5 ms",
        "% fewer FLOPs",
    )


def test_an_optimizer_that_does_not_step_is_other_work():
    decision = asked(fp8=changed(FP8_ARM, optimizer=0.0), fp8_ms=99.5)
    verdict_of(
        decision, Verdict.INVALID, "do not do the same work", "optimizer: 6.5 ms a step in BF16, 0.0 ms", "does not"
    )


def test_recomputation_that_the_fp8_arm_leaves_out_is_other_work():
    """The reference recomputes a third of its products; the FP8 arm's casts take as long as half of these would."""
    forward = [product for product in BF16.products if product.phase == "forward" and product.milliseconds > 0.1]
    again = [replace(product, phase="recompute") for product in forward]
    more = sum(product.milliseconds for product in again)
    decision = asked(bf16=with_products(BF16, *again), bf16_ms=121.5 + more)
    verdict_of(decision, Verdict.INVALID, "do not do the same work", "no recomputation in the FP8 arm")


def product_in_float32(ms):
    return Product("forward", 512, (2048, 4096), "float32", "mm", milliseconds=ms)


def test_tf32_in_one_arm_alone_is_another_precision():
    slow, fast = (with_products(arm, product_in_float32(ms)) for arm, ms in ((BF16, 200.0), (FP8_ARM, 30.0)))
    decision = asked(slow, fast, 321.5, 136.0)
    verdict_of(decision, Verdict.INVALID, "another precision", "TF32's rate", "products of 170.0 ms", "allow_tf32")
    reverse = asked(
        with_products(BF16, product_in_float32(30.0)), with_products(FP8_ARM, product_in_float32(200.0)), 151, 306
    )
    verdict_of(reverse, Verdict.INVALID, "another precision")


def test_a_product_that_only_one_arm_autocasts_is_another_precision():
    cast = replace(product_in_float32(15.0), kind="bfloat16")
    decision = asked(with_products(BF16, product_in_float32(200.0)), with_products(FP8_ARM, cast), 321.5, 121.0)
    verdict_of(decision, Verdict.INVALID, "another precision", "float32 in BF16's arm, bfloat16 in FP8's")


def test_float32_of_both_arms_is_left_alone():
    both = [with_products(arm, product_in_float32(50.0)) for arm in (BF16, FP8_ARM)]
    verdict_of(asked(*both, 171.5, 156.0), Verdict.PASS)


def test_a_reference_that_waits_for_the_gpu_is_named_with_its_calls():
    waits = replace(BF16, waits={"cudaStreamSynchronize": 3})
    decision = asked(bf16=waits, bf16_ms=160.0)
    verdict_of(decision, Verdict.INVALID, "the reference waits", "calls cudaStreamSynchronize 3 times", ".item()")
    both = asked(bf16=waits, fp8=replace(FP8_ARM, waits={"cudaStreamSynchronize": 3}))
    verdict_of(both, Verdict.PASS)


def test_a_reference_that_sleeps_is_named():
    fp8 = replace(FP8_ARM, step_ms=[100.0] * 5, busy_ms=[99.0] * 5)
    verdict_of(asked(fp8=fp8, bf16_ms=160.0), Verdict.INVALID, "the reference waits", "a sleep")


def test_code_that_is_compiled_in_the_blocks_is_named():
    decision = asked(compilations={"reference": 0, "FP8": 4})
    verdict_of(decision, Verdict.INVALID, "compiled inside the timed blocks", "4 in the FP8 arm", "TORCH_LOGS")
    verdict_of(asked(compilations={"reference": 0, "FP8": 0}), Verdict.PASS)


def test_a_speedup_above_its_limit_is_too_good():
    """Fewer of the small kernels: nothing else shrank."""
    decision = asked(fp8=changed(FP8_ARM, rest=1.0), fp8_ms=74.0)
    verdict_of(decision, Verdict.INVALID, "too good to be true", "at most 1.3", "all other kernels")


def test_products_that_no_profile_shows_are_no_other_work():
    """A library's own kernels for grouped products, say: their time is among all other kernels."""
    fp8 = [product for product in FP8_ARM.products if product.kind != FP8]
    spent = FP8_ARM.milliseconds["fp8 products"]
    hidden = changed(FP8_ARM, fp8_products=0.0, rest=FP8_ARM.milliseconds["rest"] + spent)
    verdict_of(asked(fp8=replace(hidden, products=fp8)), Verdict.PASS)


# -- arms that wait for their host ------------------------------------------------------------------------------------


BUSY = {"bf16_busy": [[113.0] * 5] * 2, "fp8_busy": [[99.4] * 5] * 2}


def launch_bound(fp8_busy, **more):
    """Transformer Engine on a slow host, with so many busy milliseconds a step in each of two processes."""
    fp8 = replace(recorded_step("1b-transformer_engine-current"), step_ms=[210.0] * 5, busy_ms=[fp8_busy] * 5)
    busy = {"bf16_busy": [[113.0, 113.2, 112.9, 113.1, 113.0]] * 2, "fp8_busy": [[fp8_busy * x for x in NOISE[:5]]] * 2}
    return asked(fp8=fp8, fp8_ms=206.0, **busy, **more)


def test_a_launch_bound_step_is_gated_on_busy_time():
    stored = {"floor": None, "history": sessions(0.59), "busy_history": sessions(1.154)}
    decision = launch_bound(98.0, **stored)
    verdict_of(decision, Verdict.PASS, "1.154x", "of busy time, since FP8 waits for the host", "0.590x of step time")
    assert decision.numbers["gated_on"] == "busy time"
    assert [baseline_of({**decision.numbers, **old}) for old in ({}, {"gated_baseline": None})] == [
        "1.154x busy",
        "0.590x",
    ]
    [note] = decision.numbers["notes"]
    assert (
        note
        == "speedup judged by busy time, 1.154x, since FP8 waits for the host: the GPU works 98 ms of FP8's 206 ms step"
    )
    verdict_of(launch_bound(120.0, **stored), Verdict.FAIL, "lost speed", "of busy time")


def test_busy_time_is_held_against_what_sessions_differ_by_in_busy_time():
    stored = {"floor": None, "history": sessions(0.59), "busy_history": sessions(1.154)}
    known = replace(MEASURED, sessions=60, busy_sessions=60)
    like_steps, apart = (
        launch_bound(98.0, **stored, components=replace(known, busy=busy)) for busy in (known.session, 0.009)
    )
    assert apart.numbers["tolerance"] > 2 * like_steps.numbers["tolerance"]
    assert apart.numbers["change_error"] > like_steps.numbers["change_error"]


def test_a_step_that_takes_longer_than_bf16s_is_not_faster_though_its_kernels_are():
    """The floor is the user's question: with FP8 on, a step takes 206 ms in place of 121."""
    slow = launch_bound(98.0)
    verdict_of(slow, Verdict.FAIL, "0.590x", "the GPU works 98.0 ms of each 206.0", "in its work alone FP8 is 1.15x")
    assert slow.numbers["gated_on"] == "step time"
    verdict_of(launch_bound(120.0), Verdict.FAIL, "launch-bound: the GPU works 120.0 ms of each 206.0 to 206.2 ms step")


def test_a_host_that_is_busy_now_and_then_leaves_busy_time_to_gate_on():
    """Blocks of Transformer Engine as one H200's host let them be: the median of them hardly shows that it waits."""
    fp8 = replace(recorded_step("1b-transformer_engine-delayed"), busy_ms=[95.6] * 5, step_ms=[97.0] * 5)
    blocks = [114.0, 108.0, 101.0, 105.0, 126.0, 99.0, 97.0, 98.0, 117.0, 99.0, 101.0, 98.6]
    evidence = TimingEvidence([[121.5] * 12] * 2, [blocks] * 2, bf16_gpu=BF16, fp8_gpu=fp8, **BUSY)
    decision = check_speedup(evidence, floor=1.0, tolerance=0.02)
    assert decision.numbers["gated_on"] == "busy time"
    quiet = replace(evidence, fp8=[[98.0, 99.0, 98.5] * 4] * 2)
    assert check_speedup(quiet, floor=1.0, tolerance=0.02).numbers["gated_on"] == "step time"


def test_what_timed_steps_wait_is_no_work_though_the_profiled_ones_met_a_quiet_host():
    """The profiled steps wait 2 ms and the timed ones 29: without busy times that were asked beside these, the GPU
    seems to work 123 ms of them, and the speedup of busy time to be too good to be true."""
    fp8 = replace(recorded_step("1b-transformer_engine-delayed"), busy_ms=[95.6] * 5, step_ms=[97.6] * 5)
    works = {"bf16_busy": [[120.0] * 26] * 2, "fp8_busy": [[96.0] * 26] * 2}
    evidence = TimingEvidence([[121.5] * 12] * 2, [[118.0, 125.0, 132.0] * 4] * 2, bf16_gpu=BF16, fp8_gpu=fp8, **works)
    account = evidence.account()
    assert (account.fp8.idle, account.fp8.busy) == pytest.approx((29.0, 96.0))
    assert account.busy_speedup == pytest.approx(1.25)
    assert replace(evidence, bf16_busy=(), fp8_busy=()).account().fp8.idle == pytest.approx(2.0)
    lost = replace(evidence, fp8_busy=[[0.0] * 14 + [96.0] * 12] * 2)
    assert lost.account().fp8.busy == pytest.approx(96.0), "steps in which the profiler saw no kernel"
    stored = {"history": sessions(0.97), "busy_history": sessions(1.25)}
    decision = check_speedup(evidence, floor=None, tolerance=0.02, **stored)
    verdict_of(decision, Verdict.PASS, "1.250x", "and 96.00 ms of FP8's 125.00 ms")


@pytest.mark.parametrize("clocks", [0.94, 0.97, 1.0, 1.03])
def test_busy_times_at_other_clocks_hide_no_reference_that_sleeps(clocks):
    """It sleeps for 15 % of its step, and FP8 waits for 2 %: at clocks 6 % higher that would seem to be 8 %."""
    fp8 = replace(recorded_step("1b-transformer_engine-delayed"), busy_ms=[95.6] * 5, step_ms=[97.6] * 5)
    works = {"bf16_busy": [[113.0 * clocks] * 26] * 2, "fp8_busy": [[95.6 * clocks] * 26] * 2}
    bf16 = replace(BF16, step_ms=[133.0] * 5, busy_ms=[113.0] * 5)
    decision = asked(bf16=bf16, fp8=fp8, bf16_ms=133.0, fp8_ms=97.6, waited=True, **works)
    verdict_of(decision, Verdict.INVALID, "the reference waits for its host")


@pytest.mark.parametrize(("retries", "memory"), [(12, True), (1, False), (0, False)])
def test_an_arm_that_waits_for_memory_is_told_so_and_not_of_its_host(retries, memory):
    """An arm alone on its GPU, whose step has no room for its tensors: no other arm is in its way."""
    bf16 = replace(BF16, step_ms=[133.0] * 5, busy_ms=[113.0] * 5)
    fp8 = replace(recorded_step("1b-transformer_engine-delayed"), busy_ms=[95.6] * 5, step_ms=[97.6] * 5)
    turns = [Turn("BF16", steps=6, retries=retries), Turn("FP8", steps=6), Turn("BF16", steps=6)]
    decision = asked(bf16=bf16, fp8=fp8, bf16_ms=133.0, fp8_ms=97.6, turns=turns)
    verdict_of(decision, Verdict.INVALID, "the reference waits for its host")
    assert ("too little memory for a step of BF16's arm" in decision.cause) is memory
    turns = [Turn("FP8", steps=6, retries=retries), Turn("BF16", retries=99), Turn("FP8", steps=6)]
    decision = launch_bound(120.0, turns=turns)
    verdict_of(decision, Verdict.FAIL, "FP8 is not faster than the best BF16")
    assert ("too little memory for a step of FP8's arm" in decision.cause) is memory
    assert ("waits for the host" in decision.cause) is not memory


@pytest.mark.parametrize("clocks", [(0.97, 1.0), (0.94, 1.0), (1.0, 0.94), (0.94, 0.94)])
def test_busy_times_at_other_clocks_accuse_no_healthy_reference(clocks):
    """Its step calls the CUDA runtime once more, at no cost; and no arm waits by the clocks alone."""
    fp8 = replace(recorded_step("1b-transformer_engine-delayed"), busy_ms=[95.6] * 5, step_ms=[97.6] * 5)
    works = {"bf16_busy": [[119.0 * clocks[0]] * 26] * 2, "fp8_busy": [[95.6 * clocks[1]] * 26] * 2}
    bf16 = replace(BF16, step_ms=[121.0] * 5, busy_ms=[119.0] * 5, waits={"cudaStreamSynchronize": 1})
    decision = asked(bf16=bf16, fp8=fp8, bf16_ms=121.0, fp8_ms=97.6, **works)
    verdict_of(decision, Verdict.PASS)
    assert decision.numbers["gated_on"] == "step time"


def test_busy_times_that_a_stored_session_asks_for_are_said_to_be_so_with_their_limit():
    decision = asked(fp8_ms=106.0, floor=None, waited=True, **BUSY)
    seen = "of busy time, since an arm has waited for the host, in this session or in a stored one"
    verdict_of(decision, Verdict.NOT_EXERCISED, seen, "limit 1.34x of busy time")


def test_a_baseline_without_busy_times_is_asked_for_step_times():
    decision = launch_bound(98.0, floor=None, history=sessions(0.59))
    assert decision.numbers["gated_on"] == "step time"
    verdict_of(decision, Verdict.PASS)
    stored = sessions(1.25)
    both = {"history": sessions(0.59), "busy_history": sessions(1.14)}
    faster_host = asked(fp8_ms=106.0, floor=None, waited=True, **both, **BUSY)
    verdict_of(faster_host, Verdict.PASS, "of busy time, as in the baseline")
    slower = launch_bound(98.0, floor=None, history=sessions(0.59), busy_history=stored)
    verdict_of(slower, Verdict.FAIL, "lost speed", "of busy time")


# -- false alarms -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_recorded_noise_raises_no_false_alarm():
    """Every process that was recorded on an H200, and blocks drawn anew from it, under its model's profile."""
    random = np.random.default_rng(0)
    alarms, drawn = [], 0
    for path in sorted(RECORDINGS.glob("*.json")):
        data = json.loads(path.read_text())
        model, _, recipe = data["case"].partition("-")
        fp8 = (
            "bf16"
            if recipe == "bf16"
            else "torchao-tensorwise"
            if "torchao" in recipe or model == "8b"
            else ("transformer_engine-delayed" if "delayed" in recipe else "transformer_engine-current")
        )
        steps = {"bf16_gpu": recorded_step(f"{model}-bf16"), "fp8_gpu": recorded_step(f"{model}-{fp8}")}
        for process in data["processes"]:
            count = min(len(process["bf16"]), len(process["fp8"])) // 2 * 2
            for _ in range(20):
                chosen = 2 * random.integers(0, count // 2, size=6)
                taken = {arm: [process[arm][i + j] for i in chosen for j in (0, 1)] for arm in ("bf16", "fp8")}
                evidence = TimingEvidence(bf16=[taken["bf16"]], fp8=[taken["fp8"]], **steps)
                decision = check_speedup(evidence, floor=1.0, tolerance=0.02)
                drawn += 1
                if decision.verdict is Verdict.INVALID:
                    alarms.append((path.name, decision.message))
    assert drawn > 1000
    assert alarms == []


# -- the table --------------------------------------------------------------------------------------------------------


def test_the_table_of_accounts_is_made_from_a_report(tmp_path, capsys):
    from benchmarks.accounts import main

    report = tmp_path / "report.json"
    decision = {"verdict": "PASS", "numbers": asked().numbers}
    entries = {"1b-torchao-tensorwise": {"decisions": {"faster": decision}}, "tiny": {"decisions": {}}}
    report.write_text(json.dumps({"entries": entries}))
    assert main([str(report), "--markdown"]) == 0
    *_, row = capsys.readouterr().out.splitlines()
    said = [cell.strip() for cell in row.strip("| ").split("|")]
    assert said[:5] == ["1b-torchao-tensorwise", "121.5", "106.0", "112.8 / 99.4", "7.2% / 6.2%"]
    assert said[5:] == ["28.4", "+15.7", "-2.7", "1.146x", "1.31x", "48%", "PASS"]
    report.write_text(json.dumps({"entries": {"tiny": {"decisions": {}}}}))
    assert main([str(report)]) == 1
