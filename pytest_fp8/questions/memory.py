"""What does it cost in memory? Peaks of one training step of both arms: evidence and the check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pytest_fp8.codes import M
from pytest_fp8.questions.findings import finding
from pytest_fp8.questions.layers.products import EVALUATION
from pytest_fp8.verdicts import Decision, Figures, Finding, Verdict, passed

QUESTION = "memory"
TOLERANCE = 0.02
"""Peaks of allocated memory repeat to the byte from run to run; 2 % leaves room for another library's workspace."""
GIB = 2.0**30
WEIGHTS, COPIES, GRADIENTS, OPTIMIZER, ACTIVATIONS, OTHER = KINDS = (
    "weights",
    "FP8 copies",
    "gradients",
    "optimizer",
    "activations",
    "other",
)
"""What is in memory at a step's peak. FP8 copies are what layers and autograd keep in FP8; activations, what the
forward pass leaves for the backward pass in another type; other, what is held for a moment, and workspaces."""
CACHE = "cache"
"""What the allocator had reserved at most, beyond the peak of what is allocated."""
TOLD = 0.01
"""A kind is named where its arms differ by this share of BF16's peak."""


@dataclass(frozen=True)
class StepMemory:
    """Bytes of one arm in one training step."""

    resident: int
    """Allocated between steps."""
    phases: Mapping[str, int]
    """The most that was allocated in ``forward``, ``backward``, ``optimizer``, and ``evaluation`` where a step
    evaluates."""
    peak_allocated: int
    """Of the whole step, without evaluation."""
    peak_reserved: int
    """The most that torch's allocator had reserved."""
    kinds: Mapping[str, int] = field(default_factory=dict)
    """:data:`KINDS` -> bytes of it at the peak, which is their sum. Empty where they were not told apart."""

    def gib(self) -> dict[str, float]:
        """The kinds and the cache, in GiB; empty where they were not told apart."""
        if not self.kinds:
            return {}
        kinds = {kind: self.kinds.get(kind, 0) / GIB for kind in KINDS}
        return {**kinds, CACHE: (self.peak_reserved - self.peak_allocated) / GIB}


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
        held = {name: arm.phases["forward"] - arm.resident for name, arm in arms.items() if "forward" in arm.phases}
        return held if len(held) == len(arms) and held["bf16"] > 0 else {}


@dataclass(frozen=True)
class MemoryFigures(Figures):
    """FP8 over BF16, and GiB."""

    ratio: float
    """Of the peaks of allocated memory."""
    bf16_peak_gib: float
    fp8_peak_gib: float
    phases: Mapping[str, float]
    """Phase -> FP8's peak of allocated memory."""
    kinds: Mapping[str, float] = field(default_factory=dict)
    """:data:`KINDS` and :data:`CACHE` -> GiB in FP8 at the step's peak; likewise in BF16. Empty where an arm did not
    tell them apart."""
    bf16_kinds: Mapping[str, float] = field(default_factory=dict)
    activation_ratio: float | None = None
    """Of what the forward pass adds. It is reported and never judged: what must fit the GPU is the step's peak."""
    baseline: float | None = None


def check_memory(evidence: MemoryEvidence, stored: float | None = None) -> Decision:
    """``stored``: the baseline's ratio of FP8's peak of allocated memory to BF16's."""
    held = evidence.activations()
    figures = MemoryFigures(
        ratio=evidence.fp8.peak_allocated / evidence.bf16.peak_allocated,
        bf16_peak_gib=evidence.bf16.peak_allocated / GIB,
        fp8_peak_gib=evidence.fp8.peak_allocated / GIB,
        phases=_peaks(evidence.fp8),
        kinds=evidence.fp8.gib(),
        bf16_kinds=evidence.bf16.gib(),
        activation_ratio=held["fp8"] / held["bf16"] if held else None,
        baseline=stored,
    )
    return _judge(figures).answer(QUESTION, figures)


def _peaks(arm: StepMemory) -> dict[str, float]:
    """Peak of allocated memory in each phase, in GiB. Evaluation is no training, and in no peak."""
    return {name: peak / GIB for name, peak in arm.phases.items() if name != EVALUATION}


def _judge(figures: MemoryFigures) -> Finding:
    ratio, stored = figures.ratio, figures.baseline
    phase = max(figures.phases, key=lambda name: figures.phases[name])
    seen = f"{ratio:.3f}x: FP8 {figures.fp8_peak_gib:.2f} GiB (in {phase}), BF16 {figures.bf16_peak_gib:.2f} GiB"
    if figures.activation_ratio is not None:
        seen += f"; the forward pass adds {figures.activation_ratio:.3f}x"
    if figures.kinds and figures.bf16_kinds:
        seen += f"; FP8 less BF16 at the peaks: {_reasons(figures)}"
    if stored is None:
        return finding(M.NO_BASELINE, "a stored baseline", seen, Verdict.NOT_EXERCISED)
    if ratio > stored * (1 + TOLERANCE):
        return finding(M.MORE_MEMORY, f"at most {stored:.3f}x +{TOLERANCE:.0%}", seen)
    if ratio < stored * (1 - TOLERANCE):
        return finding(M.LESS_MEMORY, f"{stored:.3f}x +-{TOLERANCE:.0%}", seen, Verdict.IMPROVED)
    return passed(f"{seen}; baseline {stored:.3f}x")


def _reasons(figures: MemoryFigures) -> str:
    """The kinds by which the peaks differ, the largest difference first."""
    differences = {kind: figures.kinds[kind] - figures.bf16_kinds[kind] for kind in KINDS}
    told = [kind for kind in KINDS if abs(differences[kind]) >= TOLD * figures.bf16_peak_gib]
    told.sort(key=lambda kind: -abs(differences[kind]))
    return ", ".join(f"{kind} {differences[kind]:+.2f} GiB" for kind in told) or f"no kind by {TOLD:.0%} of BF16's"
