"""Is it really faster? The paired blocks of both arms against the floor and the baseline. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pytest_fp8.questions.kernels import kernel_family
from pytest_fp8.questions.records import TimingEvidence
from pytest_fp8.rules.decide import GATED_CASES, Process, Speedup, center, decide_speedup, log_ratios
from pytest_fp8.verdicts import Decision, Verdict

QUESTION = "speedup"
LAUNCH_BOUND = 1.15
"""A step that takes this much longer than the GPU's own work in it waits for the host. Seen on an H200 at 1B: 1.04 in
BF16, whose clocks fall under sustained load, and 1.25 in Transformer Engine while each step waited for the GPU once."""
SCATTERED = 0.08
"""Share of the median between the tenth and the ninetieth of a hundred blocks. On H200s 0.01 to 0.06, and 0.14 to 0.52
for Transformer Engine's arms on a busy host."""
BAND = 0.05
"""How far the reference's own step time may lie from its baseline's: hosts of one kind differed by up to 5 %. Beyond
that the power limit treats the arms differently: with a pause added to both arms' steps on an H200, BF16 took 7.3 %
longer and FP8 9.6 %, which is no regression of FP8."""


def check_speedup(
    evidence: TimingEvidence,
    *,
    floor: float | None,
    tolerance: float,
    baseline: Sequence[Process] = (),
    baseline_reference_ms: Sequence[float] = (),
    baseline_file: str = "",
    cases: int = GATED_CASES,
) -> Decision:
    """``baseline``: log ratios per process, of each block or their median. ``floor=None`` asks the baseline alone.

    ``cases``: how many cases of this session are gated on speed; they share the session's false alarms.
    """
    processes = [log_ratios(b, f) for b, f in zip(evidence.bf16, evidence.fp8, strict=True)]
    result = decide_speedup(processes, baseline=baseline, tolerance=tolerance, floor=floor, cases=cases)
    numbers = numbers_of(evidence, result, baseline)
    invalid = disturbed(evidence, numbers["bf16_ms"], baseline_reference_ms)
    if invalid is not None:
        headline, lines = invalid
        return Decision(QUESTION, Verdict.INVALID, headline, numbers=numbers, **lines)
    low, high = result.interval
    seen = (
        f"{result.ratio:.3f}x [{low:.3f}, {high:.3f}]: BF16 {numbers['bf16_ms']:.2f} ms, "
        f"FP8 {numbers['fp8_ms']:.2f} ms a step; {len(processes)} process(es) of {len(processes[0])} blocks"
    )
    if result.change is not None:
        seen += f"; {_change(result)} against the baseline"
    against = _against(floor, tolerance, baseline)
    if result.verdict is Verdict.IMPROVED:
        return Decision(
            QUESTION,
            Verdict.IMPROVED,
            "FP8 is faster than its baseline",
            expected=against,
            seen=seen,
            cause="a library, a kernel or the model's FP8 path became faster; the old baseline no longer guards that",
            next_step='update the baseline: --fp8-update-baselines --fp8-reason "faster since ..."',
            numbers=numbers,
        )
    if result.verdict is Verdict.PASS:
        return Decision(QUESTION, Verdict.PASS, f"{seen}; {against}", numbers=numbers)
    if result.verdict is Verdict.NOT_EXERCISED:
        return Decision(
            QUESTION,
            Verdict.NOT_EXERCISED,
            "no baseline to hold the speedup against",
            expected=baseline_file or "a stored baseline",
            seen=seen,
            cause="this case was never stored for this GPU",
            next_step='run once with --fp8-update-baselines --fp8-reason "first measurement"',
            numbers=numbers,
        )
    if result.verdict is Verdict.FAIL and result.reason == "baseline":
        return Decision(
            QUESTION,
            Verdict.FAIL,
            "FP8 lost speed against BF16 since the baseline",
            expected=against,
            seen=seen,
            **_why_slower(evidence, numbers["fp8_ms"]),
            numbers=numbers,
        )
    if result.verdict is Verdict.FAIL:
        return Decision(
            QUESTION,
            Verdict.FAIL,
            "FP8 is not faster than the best BF16",
            expected=against,
            seen=seen,
            **_why_slow(evidence, numbers["fp8_ms"]),
            numbers=numbers,
        )
    return Decision(
        QUESTION,
        Verdict.INCONCLUSIVE,
        f"the blocks do not decide against the {result.reason}",
        expected=against,
        seen=seen,
        **_why_undecided(evidence),
        numbers=numbers,
    )


def _why_undecided(evidence: TimingEvidence) -> dict[str, str]:
    """Cause and next step, where the interval holds the bound: a difference that small, or times that scatter."""
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


def _why_slower(evidence: TimingEvidence, fp8_ms: float) -> dict[str, str]:
    """Cause and next step, where FP8 was faster when its baseline was stored."""
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


def _why_slow(evidence: TimingEvidence, fp8_ms: float) -> dict[str, str]:
    """Cause and next step, from what the GPU did in one profiled step of each arm."""
    bf16, fp8 = evidence.bf16_gpu, evidence.fp8_gpu
    account = where_it_went(bf16, fp8, fp8_ms)
    if evidence.fp8_compiled is False:
        cause = "the FP8 arm was not compiled: each cast then is a kernel of its own that reads and writes memory"
        return {"cause": cause + account, "next_step": "compile the model; torchao's FP8 is meant to be compiled"}
    waits = launch_bound(fp8, fp8_ms)
    if waits:
        return {"cause": waits + account, "next_step": "a larger batch, CUDA graphs, or compile the model"}
    cause = "products too small for FP8 to pay, or a recipe whose scaling costs more than it saves"
    return {"cause": cause + account, "next_step": "try a larger batch, or a cheaper recipe (tensorwise, delayed)"}


def launch_bound(fp8: Mapping[str, float], fp8_ms: float) -> str:
    """What to say of an FP8 arm that waits for the host, or nothing: of one that hardly does, or was not profiled."""
    if not fp8 or fp8_ms <= LAUNCH_BOUND * fp8["busy"]:
        return ""
    return f"launch-bound: the GPU works {fp8['busy']:.1f} ms of each {fp8_ms:.1f} ms step and waits for the host"


def where_it_went(bf16: Mapping[str, float], fp8: Mapping[str, float], fp8_ms: float) -> str:
    """The account of FP8 against BF16 in GPU milliseconds a step, or nothing where no step was profiled."""
    if not bf16 or not fp8:
        return ""
    products = sum(fp8[kind] - bf16[kind] for kind in ("fp8 products", "other products"))
    attention = fp8["attention"] - bf16["attention"]
    return (
        f" (against BF16: products {products:+.1f} ms, attention {attention:+.1f} ms, casts and all else "
        f"{fp8['rest'] - bf16['rest']:+.1f} ms; the GPU idles {max(0.0, fp8_ms - fp8['busy']):.1f} ms)"
    )


def numbers_of(evidence: TimingEvidence, result: Speedup, baseline: Sequence[Process]) -> dict[str, Any]:
    low, high = result.interval
    change = None if result.change is None else math.expm1(result.change)
    return {
        "speedup": result.ratio,
        "low": low,
        "high": high,
        "bf16_ms": float(np.median(np.concatenate([np.asarray(x) for x in evidence.bf16]))),
        "fp8_ms": float(np.median(np.concatenate([np.asarray(x) for x in evidence.fp8]))),
        "processes": len(evidence.fp8),
        "baseline": math.exp(center(baseline)) if baseline else None,
        "change": change,
        "clocks_mhz": list(evidence.clocks),
        "bf16_gpu_ms": dict(evidence.bf16_gpu),
        "fp8_gpu_ms": dict(evidence.fp8_gpu),
    }


def disturbed(
    evidence: TimingEvidence, bf16_ms: float, baseline_ms: Sequence[float]
) -> tuple[str, dict[str, str]] | None:
    """Why the blocks cannot be used, or ``None``."""
    if evidence.strangers:
        return "another process used the GPU", {
            "expected": "the GPU for this session alone",
            "seen": f"process ids {list(evidence.strangers)}",
            "cause": "a shared GPU, or a process left by an earlier run",
            "next_step": "nvidia-smi, then run again",
        }
    if evidence.throttles:
        return "the GPU's clocks were throttled", {
            "expected": "clocks at the load's will",
            "seen": ", ".join(sorted(set(evidence.throttles))),
            "cause": "heat or power supply",
            "next_step": "nvidia-smi -q -d PERFORMANCE, then run again when it is cool",
        }
    bf16, fp8 = _attention(evidence.bf16_attention), _attention(evidence.fp8_attention)
    if bf16 != fp8:
        two_cudnn = evidence.bf16_cudnn != evidence.fp8_cudnn
        return "the arms ran different attention kernels", {
            "expected": f"the same kernels in both arms; FP8 ran {', '.join(fp8) or 'none'}",
            "seen": f"the reference ran {', '.join(bf16) or 'none'}",
            "cause": f"two cuDNN libraries: {evidence.bf16_cudnn} in the reference, {evidence.fp8_cudnn} in the FP8 arm"
            if two_cudnn
            else "one arm lost its fast attention path, so the ratio measures attention and not FP8",
            "next_step": "point CUDNN_HOME at torch's own cuDNN, or pin the attention backend in both arms",
        }
    if baseline_ms:
        stored = float(np.median(np.asarray(baseline_ms)))
        if abs(math.log(bf16_ms / stored)) > BAND:
            return "the BF16 reference is outside its own band", {
                "expected": f"{stored:.2f} ms a step +-{BAND:.0%}",
                "seen": f"{bf16_ms:.2f} ms",
                "cause": "another host, power limit or BF16 library: a ratio to it says nothing about FP8",
                "next_step": "compare driver and libraries with the baseline's provenance; measure anew if they moved",
            }
    return None


def _attention(operators: Mapping[str, Sequence[str]]) -> list[str]:
    """Families of the kernels, whatever operator launched them: the same kernel is reached through
    ``scaled_dot_product_attention`` in an eager arm and through cuDNN's own operator in a compiled one."""
    return sorted({kernel_family(kernel) for kernels in operators.values() for kernel in kernels})


def _change(result: Speedup) -> str:
    """``-3.1% [-4.0%, -2.2%]``: the change against the baseline with its 99 % interval, the baseline's noise in it."""
    assert result.change is not None
    assert result.change_half_width is not None
    low, high = result.change - result.change_half_width, result.change + result.change_half_width
    return f"{math.expm1(result.change):+.1%} [{math.expm1(low):+.1%}, {math.expm1(high):+.1%}]"


def _against(floor: float | None, tolerance: float, baseline: Sequence[Process]) -> str:
    parts = []
    if baseline:
        parts.append(f"baseline {math.exp(center(baseline)):.3f}x less {100 * tolerance:g}%")
    if floor is not None:
        parts.append(f"floor {floor:.2f}x")
    return "above " + " and ".join(parts) if parts else "nothing to compare with"
