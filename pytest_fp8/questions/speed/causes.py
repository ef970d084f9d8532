"""Why FP8 is slow, slower than before, or undecided: from scatter, compilation and the GPU's own times. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pytest_fp8.questions.speed.evidence import TimingEvidence

LAUNCH_BOUND = 1.15
"""A step that takes this much longer than the GPU's own work in it waits for the host. Seen on an H200 at 1B: 1.04 in
BF16, whose clocks fall under sustained load, and 1.25 in Transformer Engine while each step waited for the GPU once."""
SCATTERED = 0.08
"""Share of the median between the tenth and the ninetieth of a hundred blocks. On H200s 0.01 to 0.06, and 0.14 to 0.52
for Transformer Engine's arms on a busy host."""


def why_undecided(evidence: TimingEvidence) -> dict[str, str]:
    """Cause and next step where the interval contains the bound: a small difference, or times that scatter."""
    arms = {"FP8": (evidence.fp8, evidence.fp8_gpu), "BF16": (evidence.bf16, evidence.bf16_gpu)}
    blocks = {arm: np.concatenate([np.asarray(x) for x in taken]) for arm, (taken, _) in arms.items()}
    # Between the tenth and the ninetieth of a hundred blocks: a single pause is not blamed.
    spread = {
        arm: float(np.subtract(*np.percentile(times, (90, 10))) / np.median(times)) for arm, times in blocks.items()
    }
    arm = max(spread, key=lambda name: spread[name])
    gpu = arms[arm][1]
    if spread[arm] > SCATTERED and gpu and np.percentile(blocks[arm], 75) > LAUNCH_BOUND * gpu["busy"]:
        ranges = ", ".join(f"{name}'s blocks {x.min():.1f} to {x.max():.1f} ms a step" for name, x in blocks.items())
        return {
            "cause": f"the host: {ranges}, where the GPU works {gpu['busy']:.1f} ms in {arm}'s",
            "next_step": "run again where the host has less to do; a larger batch lets the GPU decide",
        }
    return {
        "cause": "a difference as small as the noise",
        "next_step": "run again on a quiet GPU; if it stays, the true value lies at the bound",
    }


def why_slower(evidence: TimingEvidence, fp8_ms: float) -> dict[str, str]:
    """Cause and next step where FP8 was faster when its baseline was stored."""
    waits = launch_bound(evidence.fp8_gpu, fp8_ms)
    if waits:
        return {
            "cause": f"{waits}, so a slower or busier host slows this arm alone",
            "next_step": "a larger batch, and a baseline of that; or a host as fast as the baseline's",
        }
    return {
        "cause": "the FP8 arm became slower while BF16 did not: a library, a kernel choice or the model's FP8 path",
        "next_step": "compare library versions with the baseline's provenance; then the layers question",
    }


def why_slow(evidence: TimingEvidence, fp8_ms: float) -> dict[str, str]:
    """Cause and next step, from what the GPU did in one profiled step of each arm."""
    bf16, fp8 = evidence.bf16_gpu, evidence.fp8_gpu
    account = where_it_went(bf16, fp8, fp8_ms)
    if not evidence.fp8_compiled:
        cause = "the FP8 arm was not compiled: each cast then is a kernel of its own that reads and writes memory"
        return {"cause": cause + account, "next_step": "compile the model; torchao's FP8 is meant to be compiled"}
    waits = launch_bound(fp8, fp8_ms)
    if waits:
        return {"cause": waits + account, "next_step": "a larger batch, CUDA graphs, or compile the model"}
    cause = "products too small for FP8 to pay, or a recipe whose scaling costs more than it saves"
    return {"cause": cause + account, "next_step": "try a larger batch, or a cheaper recipe (tensorwise, delayed)"}


def launch_bound(fp8: Mapping[str, float], fp8_ms: float) -> str:
    """The cause for an FP8 arm that waits for the host. Empty where it hardly waits, or was not profiled.

    ``fp8``: GPU milliseconds of one step by kind of kernel; ``fp8_ms``: of the whole step.
    """
    if not fp8 or fp8_ms <= LAUNCH_BOUND * fp8["busy"]:
        return ""
    return f"launch-bound: the GPU works {fp8['busy']:.1f} ms of each {fp8_ms:.1f} ms step and waits for the host"


def where_it_went(bf16: Mapping[str, float], fp8: Mapping[str, float], fp8_ms: float) -> str:
    """FP8 less BF16 in GPU milliseconds a step, by kind of kernel. Empty where no step was profiled."""
    if not bf16 or not fp8:
        return ""
    products = sum(fp8[kind] - bf16[kind] for kind in ("fp8 products", "other products"))
    attention = fp8["attention"] - bf16["attention"]
    return (
        f" (against BF16: products {products:+.1f} ms, attention {attention:+.1f} ms, casts and all else "
        f"{fp8['rest'] - bf16['rest']:+.1f} ms; the GPU idles {max(0.0, fp8_ms - fp8['busy']):.1f} ms)"
    )
