"""What does it cost in memory? Peaks of one training step of both arms: evidence, how it is gathered, the check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_fp8.codes import UNCODED
from pytest_fp8.plain import from_plain
from pytest_fp8.questions.arms import PairArms
from pytest_fp8.questions.layers.products import EVALUATION
from pytest_fp8.rules.undecided import NO_BASELINE
from pytest_fp8.verdicts import Decision, Finding, Verdict

QUESTION = "memory"
TOLERANCE = 0.02
"""Peaks of allocated memory repeat to the byte from run to run; 2 % leaves room for another library's workspace."""
GIB = 2.0**30


@dataclass(frozen=True)
class Peak:
    """Bytes: the most that was allocated, and that torch's allocator had reserved."""

    allocated: int
    reserved: int


@dataclass(frozen=True)
class StepMemory:
    """Bytes of one arm in one training step."""

    resident: int
    """Allocated between steps."""
    phases: Mapping[str, Peak]
    """``forward``, ``backward``, ``optimizer``, and ``evaluation`` where a step evaluates."""
    peak_allocated: int
    """Of the whole step, without evaluation."""
    peak_reserved: int


@dataclass(frozen=True)
class MemoryEvidence:
    """What one training step takes in each arm."""

    bf16: StepMemory
    fp8: StepMemory

    def activations(self) -> dict[str, int]:
        """What the forward pass holds at its peak on top of what is resident, in bytes by arm: saved activations,
        logits, and FP8 copies that a library keeps for the backward pass. Empty where an arm's step has no forward
        phase, as some steps of the user's own."""
        arms = {"bf16": self.bf16, "fp8": self.fp8}
        held = {
            name: arm.phases["forward"].allocated - arm.resident
            for name, arm in arms.items()
            if "forward" in arm.phases
        }
        return held if len(held) == len(arms) and held["bf16"] > 0 else {}


def memory_of(arms: PairArms) -> MemoryEvidence:
    """Asked once. Raises ``ArmError``."""
    return arms.once("memory", lambda: _ask(arms))


def _ask(arms: PairArms) -> MemoryEvidence:
    bf16 = arms.shared("memory", lambda: from_plain(StepMemory, arms.bf16.request("memory")))
    return MemoryEvidence(bf16, from_plain(StepMemory, arms.fp8.request("memory")))


def check_memory(evidence: MemoryEvidence, baseline: Sequence[float] = ()) -> Decision:
    """``baseline``: stored ratios of FP8's peak of allocated memory to BF16's."""
    ratio = evidence.fp8.peak_allocated / evidence.bf16.peak_allocated
    numbers: dict[str, Any] = {
        "ratio": ratio,
        "reserved_ratio": evidence.fp8.peak_reserved / evidence.bf16.peak_reserved,
        "bf16_peak_gib": evidence.bf16.peak_allocated / GIB,
        "fp8_peak_gib": evidence.fp8.peak_allocated / GIB,
        "phases": _peaks(evidence.fp8),
        "bf16_phases": _peaks(evidence.bf16),
    }
    phase = max(numbers["phases"], key=lambda name: numbers["phases"][name])
    seen = f"{ratio:.3f}x: FP8 {numbers['fp8_peak_gib']:.2f} GiB (in {phase}), BF16 {numbers['bf16_peak_gib']:.2f} GiB"
    held = evidence.activations()
    if held:
        # Reported and never judged: what must fit the GPU is the peak of the whole step.
        numbers["activation_ratio"] = held["fp8"] / held["bf16"]
        numbers |= {f"{arm}_activation_gib": size / GIB for arm, size in held.items()}
        seen += f"; the forward pass adds {numbers['activation_ratio']:.3f}x"
    numbers |= {"baseline": max(baseline)} if baseline else {NO_BASELINE: True}
    return _judge(ratio, baseline, seen).answer(QUESTION, numbers)


def _peaks(arm: StepMemory) -> dict[str, float]:
    """Peak of allocated memory in each phase, in GiB. Evaluation is no training, and in no peak."""
    return {name: peak.allocated / GIB for name, peak in arm.phases.items() if name != EVALUATION}


def _judge(ratio: float, baseline: Sequence[float], seen: str) -> Finding:
    if not baseline:
        return Finding(
            UNCODED,
            Verdict.NOT_EXERCISED,
            headline="no baseline to hold the memory ratio against",
            expected="a stored baseline",
            seen=seen,
            next_step='run once with --fp8-update-baselines --fp8-reason "first measurement"',
        )
    stored = max(baseline)
    if ratio > stored * (1 + TOLERANCE):
        return Finding(
            UNCODED,
            Verdict.FAIL,
            headline="FP8 takes more memory against BF16 than in the baseline",
            expected=f"at most {stored:.3f}x +{TOLERANCE:.0%}",
            seen=seen,
            cause="FP8 copies of weights or activations kept beside the high-precision ones",
            next_step="compare phases and bf16_phases of this case in report.json (--fp8-report-dir): a larger "
            "forward peak is activations, a larger optimizer peak is weights or their states",
        )
    if ratio < min(baseline) * (1 - TOLERANCE):
        return Finding(
            UNCODED,
            Verdict.IMPROVED,
            headline="FP8 takes less memory against BF16 than in the baseline",
            expected=f"{stored:.3f}x +-{TOLERANCE:.0%}",
            seen=seen,
            cause="copies that are no longer kept; the old baseline no longer guards that",
            next_step='update the baseline: --fp8-update-baselines --fp8-reason "less memory since ..."',
        )
    return Finding(UNCODED, Verdict.PASS, headline=f"{seen}; baseline {stored:.3f}x")
