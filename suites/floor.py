"""``assert_faster``: FP8 exceeds the case's floor. Where it is known not to, the test is expected to fail."""

import pytest

from pytest_fp8 import ArmError, Verdict
from pytest_fp8 import gpu as gpus
from pytest_fp8.codes import S
from pytest_fp8.questions.speed.causes import launch_bound
from pytest_fp8.stats.estimate import estimate_of, ratios_by_process
from pytest_fp8.verdicts import Decision

SLOWER = {
    "1b-torchao-rowwise": "rowwise scaling costs more than it saves on 2048-wide layers: 0.93x on an H200",
    "8b-torchao-rowwise": "rowwise scaling of both gradients' operands: 0.97x on an H200, and 1.05x with twice the "
    "tokens",
    "8b8-torchao-tensorwise-eager-zero3.2-4x4096": "torchao's casts stand alone where nothing is compiled: 0.65x on "
    "two H200s, where products in FP8 earned 57 ms of a 299 ms step and casts took 224 ms",
    "1b-unsloth.te-delayed-amax_compute_algo.max-lora16.q_proj.k_proj.v_proj.o_proj": "Accelerate's Transformer "
    "Engine on Unsloth's model: 0.52x and 0.40x of Unsloth's 16-bit LoRA on an H200, for the frozen base takes "
    "gradients again, and adapters become FP8 layers that wait for the host",
}
"""Case -> why FP8 is known to be no faster than BF16 there."""
MEASURED_ON = "h200"
"""The GPU on which that was measured. On another one FP8 may be faster."""


def assert_faster(request, fp8_pair):
    """Fail where FP8 does not exceed the case's floor; as expected, where it is among :data:`SLOWER`, or where
    this machine's host is too slow for it. The suite tests libraries: it takes no further pairs of processes to prove
    either. On the GPU of :data:`MEASURED_ON` the test also fails on the day FP8 becomes faster."""
    because = SLOWER.get(fp8_pair.case.id, "")
    if request.config.option.runxfail:
        fp8_pair.assert_faster()
    elif known := why_slower(fp8_pair, because):
        fp8_pair.notes.answer("faster", Decision(S.COSTS_MORE_THAN_IT_SAVES, Verdict.FAIL, known, question="faster"))
        pytest.xfail(known)
    elif fp8_pair.assert_faster().verdict.passes and because:
        gpu, _ = gpus.detect()
        assert gpu.key != MEASURED_ON, f"{fp8_pair.case.id} is faster than BF16, and floor.SLOWER says: {because}"


def why_slower(fp8_pair, because):
    """What is known of a case whose steps do not exceed its floor in the first pair of processes: ``because``, or that
    the GPU waits for the host, and its work alone is faster. Empty where neither holds, or something disturbed them."""
    try:
        evidence = fp8_pair.timing_evidence(look=0)
    except ArmError:
        return ""  # asked for the floor, it is reported
    floor, speed = fp8_pair.case.floor, estimate_of(ratios_by_process(evidence.bf16, evidence.fp8)).ratio
    if evidence.beside.disturbed or speed > floor:
        return ""
    account = evidence.account()
    waits = launch_bound(account.fp8) if account is not None and account.busy_speedup > floor else ""
    return because or (f"this machine's host is too slow for it: {waits}" if waits else "")
