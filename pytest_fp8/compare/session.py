"""The comparison in one session: one case, base and head alternating on one GPU, no stored baseline.

Host, driver, power limit and the hour are the same for both sides, so that they cancel. The FP8 arms of both sides are
compared directly. Their BF16 arms are compared too, to tell a slower FP8 from a slower model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from pytest_fp8.arms.environment import ArmEnvironment, checkout, probed
from pytest_fp8.arms.pool import Arm, ArmPool
from pytest_fp8.arms.spec import ArmSpec
from pytest_fp8.case import Case
from pytest_fp8.codes import Code, S
from pytest_fp8.errors import SettingsError
from pytest_fp8.gpu import Gpu
from pytest_fp8.libraries import changed_versions
from pytest_fp8.plan import REFERENCE, Asking, TwoArms
from pytest_fp8.questions.asks import fp8_layers, layers_of
from pytest_fp8.questions.layers.check import check_layers
from pytest_fp8.questions.speed.sound import disturbance
from pytest_fp8.questions.speed.timing import BlockTimer
from pytest_fp8.recipes import SCRIPTS
from pytest_fp8.script.judge import presence_alone
from pytest_fp8.shipping import ship
from pytest_fp8.stats.estimate import ratios_by_process
from pytest_fp8.stats.looks import BESIDE, Looks, Outcome, against_base
from pytest_fp8.verdicts import Decision, Finding, Verdict
from pytest_fp8.workload import WorkloadReference

QUESTION = "same session"
TOLERANCE = 0.01
"""Loss of speed against base that fails. Host, driver and hour are the same for both sides, so it can be finer than a
stored baseline's: see ``python -m benchmarks.gate``."""


@dataclass(frozen=True)
class Side:
    """One side as the user named it: an interpreter, a git revision, or both; empty means what is here."""

    python: str = ""
    revision: str = ""


@dataclass(frozen=True)
class Model:
    """A user's own model as both sides get it; empty for one of the suite."""

    shipped: str | None = None
    identity: str = ""


@dataclass(frozen=True)
class SidesEvidence:
    """Milliseconds per step of base and head, block by block and process by process, and what disturbed them."""

    base: Sequence[Sequence[float]]
    head: Sequence[Sequence[float]]
    disturbed: Finding | None
    """Throttled clocks, or processes of others on the GPU."""
    attention: tuple[Mapping[str, Sequence[str]], Mapping[str, Sequence[str]]] = field(default_factory=lambda: ({}, {}))
    """Attention operator -> kernels that it launched, of base and of head."""


@dataclass
class Comparison:
    """What was measured of one case, and the verdict on head."""

    case: str
    decision: Decision
    fp8: Outcome | None = None
    bf16: Outcome | None = None
    step_ms: Mapping[str, float] = field(default_factory=dict)
    """Median milliseconds per step of ``base fp8``, ``head fp8``, ``base bf16`` and ``head bf16``."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Operation -> what this comparison waited for it."""

    def to_json(self) -> dict[str, Any]:
        return {
            "case": self.case,
            "code": self.decision.code,
            "verdict": self.decision.verdict.value,
            "message": self.decision.message,
            "step_ms": dict(self.step_ms),
            "seconds": dict(self.seconds),
            **{name: _numbers(side) for name, side in (("fp8", self.fp8), ("bf16", self.bf16)) if side is not None},
        }


def environments(base: Side, head: Side, project: Path, held: ExitStack) -> tuple[ArmEnvironment, ArmEnvironment]:
    """Both sides, probed; checkouts live as long as ``held``. Raises :class:`SettingsError`."""

    def environment(name: str, side: Side) -> ArmEnvironment:
        root = held.enter_context(checkout(side.revision, project)) if side.revision else project
        return probed(name, side.python or sys.executable, root, project)

    return environment("base", base), environment("head", head)


def compare(
    case: Case,
    base: ArmEnvironment,
    head: ArmEnvironment,
    *,
    tolerance: float | None = None,
    looks: int = len(BESIDE.pairs),
    with_bf16: bool = True,
    workload: WorkloadReference | None = None,
) -> Comparison:
    """Measure one case on both sides. Raises :class:`ArmError` where an arm cannot be built or dies, and
    :class:`SettingsError` where there is no GPU: speed is a GPU's question."""

    pool = ArmPool(require_gpu(case))
    model = Model(ship(workload, f"the workload {workload.text!r}"), workload.text) if workload is not None else Model()
    try:
        return compare_in(pool, case, model, (base, head), tolerance, looks, with_bf16)
    finally:
        pool.close()


def require_gpu(case: Case) -> Gpu:
    """The GPU that answers for this case; raises :class:`SettingsError` where none can."""
    from pytest_fp8.gpu import detect

    gpu, absent = detect()
    if case.emulated or gpu is None:
        raise SettingsError(
            S.NO_GPU,
            f"case {case.id} cannot be compared for speed here",
            expected="a GPU, and a case that runs on it",
            seen="FP8 emulated on the CPU, at no speed that means anything" if case.emulated else absent,
            next_step="run the same command on a GPU machine"
            + (f", with --case {case.id.removesuffix('-emulated')}" if case.emulated else ""),
        )
    return gpu


def compare_in(
    pool: ArmPool,
    case: Case,
    model: Model,
    sides: tuple[ArmEnvironment, ArmEnvironment],
    tolerance: float | None = None,
    looks: int = len(BESIDE.pairs),
    with_bf16: bool = False,
    cases: int = 1,
) -> Comparison:
    """:func:`compare` with the arms of a pool, which ends every other arm that it has. ``tolerance``: by default
    :data:`TOLERANCE`, or the case's own where that is finer. Raises ``ArmError``."""

    allowed = min(TOLERANCE, case.tolerance) if tolerance is None else tolerance

    def decide(evidence: SidesEvidence) -> Outcome:
        return against_base(
            ratios_by_process(evidence.base, evidence.head), allowed, cases, Looks(BESIDE.pairs[:looks], BESIDE.blocks)
        )

    before = pool.stopwatch.by_operation
    arms = _sides(case, pool, sides, model)
    evidence = arms.run(lambda: _looks(arms, looks, decide))
    fp8 = decide(evidence)
    times = {"base fp8": _median(evidence.base), "head fp8": _median(evidence.head)}
    bf16 = None
    disturbed = evidence.disturbed
    unsound = _unsound(case, arms)
    if with_bf16 and case.backend != "bf16":
        references = _sides(case.reference(), pool, sides, model)
        timer = BlockTimer(references)
        references.run(lambda: timer.measure(BESIDE.pairs[0], BESIDE.blocks))
        beside = _evidence(timer)
        bf16 = decide(beside)
        times |= {"base bf16": _median(beside.base), "head bf16": _median(beside.head)}
        disturbed = disturbed or beside.disturbed
    decision = judge(fp8, bf16, allowed, disturbed, unsound, evidence.attention, sides)
    seconds = {what: each - before.get(what, 0.0) for what, each in pool.stopwatch.by_operation.items()}
    return Comparison(case.id, decision, fp8, bf16, times, {what: each for what, each in seconds.items() if each})


def _looks(arms: TwoArms, looks: int, decide: Callable[[SidesEvidence], Outcome]) -> Asking[SidesEvidence]:
    """Blocks of fresh pairs of processes, more of them while they leave it open."""
    timer = BlockTimer(arms)
    for pairs in BESIDE.pairs[:looks]:
        yield from timer.measure(pairs, BESIDE.blocks, layers_of)
        # Asked once, after the first blocks: profiling slows a process. Later looks add fresh ones.
        base = yield from layers_of(REFERENCE)
        head = yield from fp8_layers()
        evidence = _evidence(timer, (base.attention, head.attention))
        if decide(evidence).verdict is not Verdict.INCONCLUSIVE:
            break
    return evidence


def _evidence(timer: BlockTimer, attention: tuple[Any, ...] = ({}, {})) -> SidesEvidence:
    seen = timer.beside
    disturbed = disturbance(seen.strangers, seen.throttles, seen.clocks)
    return SidesEvidence([list(x) for x in timer.reference], [list(x) for x in timer.other], disturbed, attention)


def judge(
    fp8: Outcome,
    bf16: Outcome | None,
    tolerance: float,
    disturbed: Finding | None,
    unsound: Decision | None,
    attention: tuple[Mapping[str, Sequence[str]], Mapping[str, Sequence[str]]],
    sides: tuple[ArmEnvironment, ArmEnvironment],
) -> Decision:
    """The verdict on head's FP8 arm, with its cause. Pure."""
    low, high = fp8.estimate.change_interval
    pairs = len(fp8.estimate.each)
    seen = f"{fp8.estimate.change:+.2%} [{low:+.2%}, {high:+.2%}] over {pairs} pairs of fresh processes"
    expected = f"head's FP8 step at most {tolerance:.1%} slower than base's"

    def decision(code: Code | None, verdict: Verdict, headline: str, cause: str = "", next_step: str = "") -> Decision:
        return Finding(code, verdict, headline, expected, seen, cause, next_step).answer(QUESTION)

    if disturbed is not None:
        return disturbed.answer(QUESTION)
    if unsound is not None:
        return replace(unsound, question=QUESTION, headline=f"in head {unsound.headline}", figures=None)
    changed = "; ".join(differences(*sides)) or "the project's own code"
    if fp8.verdict is Verdict.FAIL:
        cause = f"changed between base and head: {changed}"
        if attention[0] != attention[1]:
            cause = f"the sides ran different attention kernels; {cause}"
        return decision(
            S.SLOWER_THAN_BASE,
            Verdict.FAIL,
            "head is slower than base in FP8" + _whose(fp8, bf16),
            cause,
            "change one of them at a time and compare again",
        )
    if fp8.verdict is Verdict.INCONCLUSIVE:
        return decision(
            S.UNDECIDED,
            Verdict.INCONCLUSIVE,
            "the blocks do not decide",
            "the true change lies at the tolerance, or the processes spread",
            "run again on a quiet GPU, or with another --tolerance",
        )
    how = "faster than base's" if low > 0 else "as fast as base's"
    if high < 0:
        how = "slower than base's, within the tolerance"
    return decision(None, Verdict.PASS, f"head's FP8 step is {how}" + _whose(fp8, bf16))


def differences(base: ArmEnvironment, head: ArmEnvironment) -> list[str]:
    """The libraries that differ: ``torch 2.11.0 -> 2.12.0``."""
    return changed_versions(base.versions, head.versions)


def _whose(fp8: Outcome, bf16: Outcome | None) -> str:
    """Whether a change that is more than noise is FP8's own, or BF16's too."""
    if bf16 is None or abs(fp8.estimate.theta) <= fp8.estimate.half_width:
        return ""
    own = fp8.estimate.less(bf16.estimate)
    if abs(own.theta) <= own.half_width:
        return f"; BF16 changed as much ({bf16.estimate.change:+.2%}): common to both precisions, not FP8's own"
    return f"; BF16 changed by {bf16.estimate.change:+.2%}: {own.change:+.2%} is FP8's own"


def _sides(
    case: Case,
    pool: ArmPool,
    sides: tuple[ArmEnvironment, ArmEnvironment],
    model: Model,
) -> TwoArms:
    """One case's arms in both environments, alive: base's is the reference, head's the other."""
    digest = case.digest(model.identity)
    base, head = (Arm(f"{digest}@{side.name}", ArmSpec(case, "cuda", model.shipped), pool, side) for side in sides)
    arms = TwoArms(case, pool, base, head)
    arms.start()
    return arms


def _unsound(case: Case, arms: TwoArms) -> Decision | None:
    """What is wrong with FP8 in head's arm, or ``None``."""
    if case.backend == "bf16":
        return None
    decision = arms.run(presence_alone) if case.backend in SCRIPTS else check_layers(case, arms.run(fp8_layers))
    return decision if decision.verdict is Verdict.FAIL else None


def _median(arms: Sequence[Sequence[float]]) -> float:
    return median(time for process in arms for time in process)


def _numbers(side: Outcome) -> dict[str, Any]:
    found = side.estimate
    interval = found.change_interval
    return {"change": found.change, "interval": interval, "pairs": len(found.each), "verdict": side.verdict.value}
