"""The same-job comparison: one case, base and head alternating on one GPU, no stored baseline.

The strongest gate there is: host, driver, power limit and the hour cancel. The FP8 arms of both sides are compared
directly; their BF16 arms too, to tell a slower FP8 from a slower machine or model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_fp8.arms.environment import ArmEnvironment, checkout, probed
from pytest_fp8.case import Case
from pytest_fp8.errors import SettingsError
from pytest_fp8.rules.same_job import BLOCKS, PAIRS, SameJob, decide_same_job, own_change
from pytest_fp8.verdicts import Decision, Verdict

if TYPE_CHECKING:
    from pytest_fp8.arms.evidence import PairArms
    from pytest_fp8.arms.pool import ArmPool
    from pytest_fp8.gpu import Gpu
    from pytest_fp8.questions.records import TimingEvidence
    from pytest_fp8.workload import WorkloadReference

QUESTION = "same job"


@dataclass(frozen=True)
class Side:
    """One side as the user named it: an interpreter, a git revision, or both; empty means what is here."""

    python: str = ""
    revision: str = ""


@dataclass
class Comparison:
    """What was measured of one case."""

    case: str
    decision: Decision
    fp8: SameJob | None = None
    bf16: SameJob | None = None
    step_ms: Mapping[str, float] = field(default_factory=dict)
    """Median milliseconds per step of ``base fp8``, ``head fp8``, ``base bf16`` and ``head bf16``."""
    seconds: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "case": self.case,
            "verdict": self.decision.verdict.value,
            "message": self.decision.message,
            "step_ms": dict(self.step_ms),
            "seconds": dict(self.seconds),
            **{name: _numbers(side) for name, side in (("fp8", self.fp8), ("bf16", self.bf16)) if side is not None},
        }


def environments(base: Side, head: Side, project: Path, held: ExitStack) -> tuple[ArmEnvironment, ArmEnvironment]:
    """Both sides, probed; checkouts live as long as ``held``. Raises :class:`SettingsError`."""
    import sys

    def environment(name: str, side: Side) -> ArmEnvironment:
        root = held.enter_context(checkout(side.revision, project)) if side.revision else project
        return probed(name, side.python or sys.executable, root)

    return environment("base", base), environment("head", head)


def compare(
    case: Case,
    base: ArmEnvironment,
    head: ArmEnvironment,
    *,
    tolerance: float,
    looks: int = len(PAIRS),
    with_bf16: bool = True,
    workload: WorkloadReference | None = None,
) -> Comparison:
    """Measure one case on both sides. Raises :class:`ArmError` where an arm cannot be built or dies, and
    :class:`SettingsError` where there is no GPU: speed is a GPU's question."""
    from pytest_fp8.arms.pool import ArmPool

    pool = ArmPool(require_gpu(case))
    try:
        return _compare(case, pool, (base, head), tolerance, looks, with_bf16, workload)
    finally:
        pool.close()


def require_gpu(case: Case) -> Gpu:
    """The GPU that answers for this case; raises :class:`SettingsError` where none can."""
    from pytest_fp8.gpu import detect

    gpu, absent = detect()
    if case.emulated or gpu is None:
        raise SettingsError(
            f"case {case.id} cannot be compared for speed here",
            expected="a GPU, and a case that runs on it",
            seen="FP8 emulated on the CPU, at no speed that means anything" if case.emulated else absent,
            next_step="run the same command on a GPU machine"
            + (f", with --case {case.id.removesuffix('-emulated')}" if case.emulated else ""),
        )
    return gpu


def _compare(
    case: Case,
    pool: ArmPool,
    sides: tuple[ArmEnvironment, ArmEnvironment],
    tolerance: float,
    looks: int,
    with_bf16: bool,
    workload: WorkloadReference | None,
) -> Comparison:
    from pytest_fp8.rules.decide import log_ratios

    def ratios(evidence: TimingEvidence) -> list[list[float]]:
        return [log_ratios(b, h) for b, h in zip(evidence.bf16, evidence.fp8, strict=True)]

    direct = _pair(case, pool, sides, workload)
    for pairs in PAIRS[:looks]:
        evidence = direct.add_processes(pairs, BLOCKS)
        fp8 = decide_same_job(ratios(evidence), tolerance, looks)
        if fp8.verdict is not Verdict.INCONCLUSIVE:
            break
    times = {"base fp8": _median(evidence.bf16), "head fp8": _median(evidence.fp8)}
    bf16 = None
    disturbed = [*evidence.throttles, *(f"process {pid}" for pid in evidence.strangers)]
    if with_bf16 and case.backend != "bf16":
        beside = _pair(case.reference(), pool, sides, workload).add_processes(PAIRS[0], BLOCKS)
        bf16 = decide_same_job(ratios(beside), tolerance, looks)
        times |= {"base bf16": _median(beside.bf16), "head bf16": _median(beside.fp8)}
        disturbed += [*beside.throttles, *(f"process {pid}" for pid in beside.strangers)]
    unsound = _presence(case, direct)
    attention = (evidence.bf16_attention, evidence.fp8_attention)
    decision = judge(fp8, bf16, tolerance, looks, disturbed, unsound, attention, sides)
    return Comparison(case.id, decision, fp8, bf16, times, dict(pool.seconds))


def judge(
    fp8: SameJob,
    bf16: SameJob | None,
    tolerance: float,
    looks: int,
    disturbed: Sequence[str],
    unsound: str,
    attention: tuple[Any, Any],
    sides: tuple[ArmEnvironment, ArmEnvironment],
) -> Decision:
    """The verdict on head's FP8 arm, with its cause. Pure."""
    low, high = fp8.interval
    seen = f"{fp8.change:+.2%} [{low:+.2%}, {high:+.2%}] over {fp8.pairs} pairs of fresh processes"
    expected = f"head's FP8 step at most {tolerance:.1%} slower than base's"

    def decision(verdict: Verdict, headline: str, cause: str = "", next_step: str = "", what: str = seen) -> Decision:
        return Decision(QUESTION, verdict, headline, expected, what, cause, next_step)

    if disturbed:
        return decision(
            Verdict.INVALID,
            "the GPU was shared or its clocks were throttled",
            "a ratio taken meanwhile says nothing",
            "nvidia-smi, then run again",
            ", ".join(sorted(set(disturbed))),
        )
    if unsound:
        return decision(Verdict.FAIL, "FP8 does not run in head as it should", what=unsound, next_step="pytest suites")
    changed = "; ".join(differences(*sides)) or "the project's own code"
    if fp8.verdict is Verdict.FAIL:
        cause = f"changed between base and head: {changed}"
        if attention[0] != attention[1]:
            cause = f"the sides ran different attention kernels; {cause}"
        return decision(
            Verdict.FAIL,
            "head is slower than base in FP8" + _whose(fp8, bf16, looks),
            cause,
            "change one of them at a time and compare again",
        )
    if fp8.verdict is Verdict.INCONCLUSIVE:
        return decision(
            Verdict.INCONCLUSIVE,
            "the blocks do not decide",
            "the true change lies at the tolerance, or the processes spread",
            "run again on a quiet GPU, or with another --tolerance",
        )
    how = "faster than base's" if low > 0 else "as fast as base's"
    if high < 0:
        how = "slower than base's, within the tolerance"
    return decision(Verdict.PASS, f"head's FP8 step is {how}" + _whose(fp8, bf16, looks))


def differences(base: ArmEnvironment, head: ArmEnvironment) -> list[str]:
    """The libraries that differ: ``torch 2.11.0 -> 2.12.0``."""
    names = sorted(set(base.versions) | set(head.versions))
    return [
        f"{name} {base.versions.get(name, 'none')} -> {head.versions.get(name, 'none')}"
        for name in names
        if base.versions.get(name) != head.versions.get(name)
    ]


def _whose(fp8: SameJob, bf16: SameJob | None, looks: int) -> str:
    """Whether a change that is more than noise is FP8's own."""
    if bf16 is None or abs(fp8.theta) <= fp8.half_width:
        return ""
    own, half = own_change(fp8, bf16, looks)
    if abs(own) <= half:
        return f"; BF16 changed as much ({bf16.change:+.2%}): common to both precisions, not FP8's own"
    return f"; BF16 changed by {bf16.change:+.2%}: {math.expm1(own):+.2%} is FP8's own"


def _pair(
    case: Case,
    pool: ArmPool,
    sides: tuple[ArmEnvironment, ArmEnvironment],
    workload: WorkloadReference | None,
) -> PairArms:
    from pytest_fp8.arms.evidence import PairArms
    from pytest_fp8.arms.spec import ArmSpec
    from pytest_fp8.shipping import ship

    shipped = ship(workload, f"the workload {workload.text!r}") if workload is not None else None
    digest = case.digest(workload.text if workload is not None else "")
    arms = [pool.arm(f"{digest}@{side.name}", ArmSpec(case, "cuda", shipped), side) for side in sides]
    pair = PairArms.between(*arms)
    pair.start()
    return pair


def _presence(case: Case, pair: PairArms) -> str:
    """Why head's arm does not answer for FP8, or an empty string."""
    from pytest_fp8.questions.layers import check_layers

    if case.backend == "bf16":
        return ""
    decision = check_layers(case, pair.layers())
    return decision.headline if decision.verdict is Verdict.FAIL else ""


def _median(arms: Sequence[Sequence[float]]) -> float:
    from statistics import median

    return median(time for process in arms for time in process)


def _numbers(side: SameJob) -> dict[str, Any]:
    return {"change": side.change, "interval": side.interval, "pairs": side.pairs, "verdict": side.verdict.value}
