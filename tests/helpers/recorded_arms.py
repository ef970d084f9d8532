"""Two arms' steps as recorded on an H200, timed by hand, and the decision on their speedup."""

from __future__ import annotations

import math

from helpers.steps import recorded_step
from pytest_fp8.questions.speed.check import check_speedup
from pytest_fp8.questions.speed.evidence import TimingEvidence

BF16, FP8_ARM = recorded_step("1b-bf16"), recorded_step("1b-torchao-tensorwise")
NOISE = [0.999, 1.001, 1.0, 1.002, 0.998, 1.0] * 2
STORED = ("history", "busy_history", "host_bound")


def sessions(speedup):
    """Four stored sessions of four processes, all of this speedup."""
    return [[[math.log(speedup)] * 8] * 4] * 4


def asked(bf16=BF16, fp8=FP8_ARM, bf16_ms=121.5, fp8_ms=106.0, floor=1.0, **more):
    """The decision on these steps, timed at these milliseconds in two processes."""
    check = {name: more.pop(name) for name in (*STORED, "components") if name in more}
    blocks = {"bf16": [[bf16_ms * x for x in NOISE]] * 2, "fp8": [[fp8_ms * x for x in reversed(NOISE)]] * 2}
    evidence = TimingEvidence(**blocks, bf16_step=bf16, fp8_step=fp8, **more)
    return check_speedup(evidence, floor=floor, tolerance=0.02, **check)
