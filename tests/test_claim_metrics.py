"""What the stored baselines say in each metric of a claim."""

from __future__ import annotations

import math

import pytest

from benchmarks.claims.judge import Near, read
from helpers.claims import CASE, OTHER, baseline, speed


def test_tokens_per_second_come_from_the_step_time_and_are_as_uncertain_as_hosts():
    stored = {CASE.id: baseline(fp8_ms=[10.0, 10.0])}
    found = read("fp8_tokens_per_s", Near(CASE), stored)
    assert found.value == pytest.approx(24 * 1024 / 0.010)
    assert (found.low, found.high) == pytest.approx((found.value * 0.95, found.value * 1.05))


def test_a_gain_over_another_case_is_the_ratio_of_their_speedups():
    stored = {CASE.id: baseline(speedup=speed(1.38)), OTHER.id: baseline(OTHER, speedup=speed(1.2))}
    found = read("speedup_over_other", Near(CASE, other=OTHER), stored)
    assert found.value == pytest.approx(1.15)
    assert found.low < 1.15 < found.high


@pytest.mark.parametrize(("arm", "expected"), [("bf16", 2.0), ("fp8", 2.5)])
def test_step_times_of_two_cases(arm, expected):
    stored = {CASE.id: baseline(fp8_ms=[20.0]), OTHER.id: baseline(OTHER, fp8_ms=[8.0], bf16_ms=[10.0])}
    assert read(f"step_over_other_{arm}", Near(CASE, other=OTHER), stored).value == pytest.approx(expected)


def test_the_share_of_the_adapters_is_found_again():
    share, gain = 0.4, 1.5
    adapted = 1 / ((1 - share) / gain + share)
    stored = {CASE.id: baseline(speedup=speed(adapted)), OTHER.id: baseline(OTHER, speedup=speed(gain))}
    found = read("adapter_share", Near(CASE, other=OTHER), stored)
    assert found.value == pytest.approx(share)
    assert found.low < share < found.high


def test_without_a_gain_in_full_training_there_is_no_share():
    stored = {CASE.id: baseline(speedup=speed(1.0)), OTHER.id: baseline(OTHER, speedup=speed(0.97))}
    assert read("adapter_share", Near(CASE, other=OTHER), stored) is None


def test_a_loss_gap_has_the_spread_of_its_seeds():
    few, many = (read("loss_gap", Near(CASE), {CASE.id: baseline(loss_gap=[0.0, 0.01] * n)}) for n in (1, 8))
    assert few.value == many.value == pytest.approx(0.005)
    assert few.low < many.low < 0.005 < many.high < few.high
    assert read("loss_gap", Near(CASE), {CASE.id: baseline(loss_gap=[0.0])}).high == math.inf
