"""What does it cost in memory? Peaks of one training step of both arms. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pytest_fp8.questions.products import EVALUATION
from pytest_fp8.questions.records import MemoryEvidence
from pytest_fp8.verdicts import Decision, Verdict

QUESTION = "memory"
TOLERANCE = 0.02
"""Peaks of allocated memory repeat to the byte from run to run; 2 % leaves room for another library's workspace."""
GIB = 2.0**30


def check_memory(evidence: MemoryEvidence, baseline: Sequence[float] = ()) -> Decision:
    """``baseline``: stored ratios of FP8's peak of allocated memory to BF16's."""
    ratio = evidence.fp8["peak_allocated"] / evidence.bf16["peak_allocated"]
    numbers: dict[str, Any] = {
        "ratio": ratio,
        "reserved_ratio": evidence.fp8["peak_reserved"] / evidence.bf16["peak_reserved"],
        "bf16_peak_gib": evidence.bf16["peak_allocated"] / GIB,
        "fp8_peak_gib": evidence.fp8["peak_allocated"] / GIB,
        # Evaluation is no training, and in no peak.
        "phases": {n: p["allocated"] / GIB for n, p in evidence.fp8["phases"].items() if n != EVALUATION},
    }
    phase = max(numbers["phases"], key=lambda name: numbers["phases"][name])
    seen = f"{ratio:.3f}x: FP8 {numbers['fp8_peak_gib']:.2f} GiB (in {phase}), BF16 {numbers['bf16_peak_gib']:.2f} GiB"
    held = evidence.activations()
    if held:
        # Described and never judged: what counts against a GPU's memory is the peak of the whole step.
        numbers["activation_ratio"] = held["fp8"] / held["bf16"]
        numbers |= {f"{arm}_activation_gib": size / GIB for arm, size in held.items()}
        seen += f"; the forward pass adds {numbers['activation_ratio']:.3f}x"
    if not baseline:
        return Decision(
            QUESTION,
            Verdict.NOT_EXERCISED,
            "no baseline to hold the memory ratio against",
            expected="a stored baseline",
            seen=seen,
            next_step='run once with --fp8-update-baselines --fp8-reason "first measurement"',
            numbers=numbers,
        )
    stored = max(baseline)
    numbers["baseline"] = stored
    if ratio > stored * (1 + TOLERANCE):
        return Decision(
            QUESTION,
            Verdict.FAIL,
            "FP8 takes more memory against BF16 than in the baseline",
            expected=f"at most {stored:.3f}x +{TOLERANCE:.0%}",
            seen=seen,
            cause="FP8 copies of weights or activations kept beside the high-precision ones",
            next_step="compare the phases in the report: forward is activations, optimizer is weights",
            numbers=numbers,
        )
    if ratio < min(baseline) * (1 - TOLERANCE):
        return Decision(
            QUESTION,
            Verdict.IMPROVED,
            "FP8 takes less memory against BF16 than in the baseline",
            expected=f"{stored:.3f}x +-{TOLERANCE:.0%}",
            seen=seen,
            cause="copies that are no longer kept; the old baseline no longer guards that",
            next_step='update the baseline: --fp8-update-baselines --fp8-reason "less memory since ..."',
            numbers=numbers,
        )
    return Decision(QUESTION, Verdict.PASS, f"{seen}; baseline {stored:.3f}x", numbers=numbers)
