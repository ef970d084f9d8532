"""What the times of kernels in a step say of an FP8 arm that is slow or undecided."""

from __future__ import annotations

from helpers.steps import gpu_step
from pytest_fp8.questions.layers.products import FP8, Product
from pytest_fp8.questions.speed.account import IDLE
from pytest_fp8.questions.speed.check import check_speedup
from pytest_fp8.questions.speed.evidence import TimingEvidence
from pytest_fp8.verdicts import Verdict

STEP = 120.0
BF16 = {"fp8 products": 0.0, "other products": 80.0, "attention": 10.0, "rest": 8.0, "busy": 98.0}


def product(kind, milliseconds, inner=64):
    return Product("forward", inner, (128, 256), kind, "mm", milliseconds=milliseconds)


REFERENCE = gpu_step(BF16, [product("bfloat16", 75.0), product("bfloat16", 5.0, inner=32)])


def slow(busy, **more):
    """An FP8 arm at ``STEP`` ms, of which the GPU works ``busy``, against BF16 at 100 ms."""
    fp8 = {"fp8 products": 45.0, "other products": 5.0, "attention": 10.5, "rest": busy - 60.5, "busy": busy}
    step = gpu_step(fp8, [product(FP8, 45.0), product("bfloat16", 5.0, inner=32)])
    evidence = TimingEvidence([[100.0] * 12] * 2, [[STEP] * 12] * 2, bf16_step=REFERENCE, fp8_step=step, **more)
    return check_speedup(evidence, floor=1.0, tolerance=0.02).message


def test_a_gpu_that_waits_for_the_host_makes_the_step_launch_bound():
    said = slow(STEP * (1 - IDLE) - 0.5)
    assert "launch-bound: the GPU works 107.5 ms of each 120.0 ms step and waits for the host" in said
    assert "CUDA graphs" in said
    assert (
        "products in FP8 earned 30.0 ms, casts and other kernels +39.0 ms, all else +11.0 ms; limit 1.44x of busy time"
        in said
    )
    assert "idle 2.0% in BF16, 10.4% in FP8" in said


def undecided(fp8_ms, bf16_ms, fp8_busy, bf16_busy):
    """The message where blocks of these milliseconds, in turn, leave it open whether FP8 is faster."""
    spent, kinds = (bf16_busy - 18, 0.55 * (bf16_busy - 18)), ("bfloat16", FP8)
    gpu = [
        gpu_step({"attention": 10.0, name: time, "rest": busy - 10 - time, "busy": busy}, [product(kind, time)])
        for name, busy, time, kind in zip(
            ("other products", "fp8 products"), (bf16_busy, fp8_busy), spent, kinds, strict=True
        )
    ]
    evidence = TimingEvidence([bf16_ms * 4] * 2, [fp8_ms * 4] * 2, bf16_step=gpu[0], fp8_step=gpu[1])
    decision = check_speedup(evidence, floor=1.0, tolerance=0.02)
    assert decision.verdict is Verdict.INCONCLUSIVE, decision.message
    return decision.message


def test_a_difference_as_small_as_the_noise_blames_nobody():
    said = undecided([100.0, 101.0, 99.0, 100.5], [100.1, 100.9, 99.2, 100.4], fp8_busy=97.0, bf16_busy=98.0)
    assert "a difference as small as the noise" in said
    assert "the host" not in said
