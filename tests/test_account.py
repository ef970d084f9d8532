"""The account of a speedup, on steps recorded on an H200: its parts, its limit, and no false alarm."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from helpers.evidence import verdict_of
from helpers.recorded_arms import BF16, FP8_ARM, asked
from helpers.steps import TIMED, recorded_step
from pytest_fp8 import Verdict
from pytest_fp8.questions.layers.evidence import KernelTime
from pytest_fp8.questions.layers.products import FP8, LayerCall, Product
from pytest_fp8.questions.speed.account import account_of, covered_by_fp8, role_times
from pytest_fp8.questions.speed.check import check_speedup
from pytest_fp8.questions.speed.evidence import TimingEvidence

HEALTHY = [
    ("1b-bf16", "1b-torchao-tensorwise", 106.0),
    ("1b-bf16", "1b-transformer_engine-current", 104.0),
    ("1b-bf16", "1b-transformer_engine-delayed", 100.0),
    ("8b-bf16", "8b-torchao-tensorwise", 299.0),
]
RECORDINGS = Path(__file__).parent.parent / "benchmarks" / "gate" / "recordings"


def account(bf16, fp8, fp8_ms):
    found = account_of(recorded_step(bf16), recorded_step(fp8), [TIMED[bf16]], [fp8_ms])
    assert found is not None
    return found


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


@pytest.mark.parametrize(("bf16", "fp8", "fp8_ms"), HEALTHY)
def test_the_parts_of_the_difference_sum_to_it(bf16, fp8, fp8_ms):
    found = account(bf16, fp8, fp8_ms)
    difference = -found.earned + found.casts + found.all_else
    assert difference == pytest.approx(found.fp8.step - found.bf16.step)
    for arm in (found.bf16, found.fp8):
        assert arm.busy + arm.idle == pytest.approx(arm.step)
        assert sum(arm.classes.values()) == pytest.approx(arm.busy, rel=0.02)


def test_the_report_holds_the_account_as_plain_data():
    numbers = asked().numbers["account"]
    assert json.loads(json.dumps(numbers)) == numbers
    assert numbers["fp8"]["classes"]["fp8 products"] > 0


def test_roles_that_share_their_extents_share_the_time():
    """16 tokens: dgrad of 32 -> 16 features and wgrad of it have one size."""
    call = LayerCall("a", 32, 16, rows=16)
    products = [
        Product("forward", 32, (16, 16), FP8, "mm", milliseconds=1.0),
        Product("backward", 16, (16, 32), FP8, "mm", milliseconds=2.0),
        Product("backward", 16, (32, 16), FP8, "mm", milliseconds=2.0),
        Product("forward", 7, (9, 9), "float32", "bmm", milliseconds=0.5),
    ]
    assert role_times(products, [call]) == {
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


@pytest.mark.slow
@pytest.mark.parametrize("draws", [1, pytest.param(20, marks=pytest.mark.nightly)])
def test_recorded_noise_raises_no_false_alarm(draws):
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
        steps = {"bf16_step": recorded_step(f"{model}-bf16"), "fp8_step": recorded_step(f"{model}-{fp8}")}
        for process in data["processes"]:
            count = min(len(process["bf16"]), len(process["fp8"])) // 2 * 2
            for _ in range(draws):
                chosen = 2 * random.integers(0, count // 2, size=6)
                taken = {arm: [process[arm][i + j] for i in chosen for j in (0, 1)] for arm in ("bf16", "fp8")}
                evidence = TimingEvidence(bf16=[taken["bf16"]], fp8=[taken["fp8"]], **steps)
                decision = check_speedup(evidence, floor=1.0, tolerance=0.02)
                drawn += 1
                if decision.verdict is Verdict.INVALID:
                    alarms.append((path.name, decision.message))
    assert drawn > 50 * draws
    assert alarms == []
