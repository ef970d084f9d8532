"""The wire: said of both arms in the account of a speedup, named where it costs the FP8 arm its speed, and held
against what a configuration promises to gather."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers.evidence import verdict_of
from helpers.steps import recorded_step
from pytest_fp8 import Verdict
from pytest_fp8.questions.layers.evidence import WireTime
from pytest_fp8.questions.speed.check import check_speedup
from pytest_fp8.questions.speed.evidence import TimingEvidence

BF16, FP8_ARM = recorded_step("1b-bf16"), recorded_step("1b-torchao-tensorwise")
NOISE = [0.999, 1.001, 1.0, 1.002, 0.998, 1.0] * 2


def travelling(step, gather, reduce, exposed, elements=10**9, dtype="bfloat16", size=2):
    """The step on one of two ranks: so many milliseconds of collectives, of which ``exposed`` are busy time."""
    rows = [
        WireTime("all-gather", dtype, 64, elements, elements * size, gather),
        WireTime("reduce-scatter", "bfloat16", 32, elements, elements * 2, reduce),
    ]
    busy = step.milliseconds["busy"] + exposed
    milliseconds = {**step.milliseconds, "communication": gather + reduce, "busy": busy}
    return replace(step, milliseconds=milliseconds, wire=rows, exposed_ms=exposed)


def asked(bf16, fp8, bf16_ms=121.5, fp8_ms=106.0):
    blocks = {"bf16": [[bf16_ms * x for x in NOISE]] * 2, "fp8": [[fp8_ms * x for x in reversed(NOISE)]] * 2}
    return check_speedup(TimingEvidence(**blocks, bf16_step=bf16, fp8_step=fp8), floor=1.0, tolerance=0.02)


def test_both_arms_wires_are_in_the_account():
    decision = asked(travelling(BF16, 12.0, 8.0, 4.0), travelling(FP8_ARM, 12.0, 8.0, 4.0), 125.5, 110.0)
    verdict_of(decision, Verdict.PASS, "; on the wire all-gather 1", "not hidden in BF16; all-gather 1", "in FP8")
    wire = decision.numbers["account"]["fp8"]["wire"]
    assert [row["operation"] for row in wire["rows"]] == ["all-gather", "reduce-scatter"]
    assert wire["rows"][0]["bytes"] == 2 * 10**9
    assert wire["exposed"] == pytest.approx(4.0, rel=0.1)


def test_a_wire_that_is_slower_in_the_fp8_arm_alone_is_named():
    decision = asked(travelling(BF16, 12.0, 8.0, 2.0), travelling(FP8_ARM, 32.0, 8.0, 22.0), 123.5, 128.0)
    verdict_of(decision, Verdict.FAIL, "not faster than the best BF16", "the FP8 arm's collectives take", "longer than")


def test_a_wire_that_products_hid_in_bf16_is_named():
    decision = asked(travelling(BF16, 20.0, 10.0, 0.0), travelling(FP8_ARM, 20.0, 10.0, 18.0), 121.5, 124.0)
    verdict_of(decision, Verdict.FAIL, "less to hide behind", "18.", "more tokens on each rank")


def test_weights_gathered_in_fp8_are_no_less_work():
    """A third of all bytes less, and of the time: as many numbers."""
    fp8 = travelling(FP8_ARM, 8.0, 12.0, 4.0, dtype="uint8", size=1)
    verdict_of(asked(travelling(BF16, 24.0, 12.0, 8.0), fp8, 129.5, 110.0), Verdict.PASS)


def test_ranks_that_wait_for_each_other_while_they_are_profiled_are_no_other_work():
    """As with Transformer Engine on two H200s: collectives waited for 100 ms in the profiled step of the FP8 arm, and
    for 5 ms in steps that follow each other. Attention took what it takes in BF16."""
    bf16 = travelling(BF16, 20.0, 8.0, 4.0)
    profiled = travelling(FP8_ARM, 115.0, 10.0, 105.0)
    steps = {"step_ms": [112.0] * 5, "busy_ms": [109.0] * 5, "compute_ms": [FP8_ARM.milliseconds["busy"]] * 5}
    decision = asked(bf16, replace(profiled, **steps), 125.5, 110.0)
    verdict_of(decision, Verdict.PASS)
    account = decision.numbers["account"]["fp8"]
    assert account["classes"]["attention"] == pytest.approx(FP8_ARM.milliseconds["attention"], rel=0.03)
    hidden_not = account["busy"] * (1 - FP8_ARM.milliseconds["busy"] / 109.0)
    assert account["wire"]["exposed"] == pytest.approx(hidden_not), "not the 105 ms of the profiled step"


def test_an_fp8_arm_that_sends_less_is_other_work():
    fp8 = travelling(FP8_ARM, 8.0, 5.0, 2.0, elements=10**9 // 3)
    decision = asked(travelling(BF16, 24.0, 12.0, 8.0), fp8, 129.5, 108.0)
    verdict_of(decision, Verdict.INVALID, "do not do the same work", "the FP8 arm sends less")
