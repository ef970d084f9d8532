"""Speedups that are not FP8's own: other work, a reference that waits, too good to be true."""

from __future__ import annotations

from dataclasses import replace

from helpers.evidence import verdict_of
from helpers.recorded_arms import BF16, FP8_ARM, asked
from helpers.steps import changed, on_half_the_rows, with_products
from pytest_fp8 import Verdict
from pytest_fp8.questions.layers.products import FP8, Product
from pytest_fp8.questions.speed.host import Beside, Turn


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
    decision = asked(beside=Beside(turns=[Turn("BF16"), Turn("FP8", compilations=4)]))
    verdict_of(decision, Verdict.INVALID, "compiled inside the timed blocks", "4 in the FP8 arm", "TORCH_LOGS")
    verdict_of(asked(beside=Beside(turns=[Turn("BF16"), Turn("FP8")])), Verdict.PASS)


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
