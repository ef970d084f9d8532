"""The comparison in one session: one case, base and head alternating on one GPU, no stored baseline.

Host, driver, power limit and the hour are the same for both sides, so that they cancel. The FP8 arms of both sides are
compared directly. Their BF16 arms are compared too, to tell a slower FP8 from a slower model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from pytest_fp8.arms.environment import ArmEnvironment, checkout, side_at
from pytest_fp8.arms.pool import Arm, ArmPool
from pytest_fp8.arms.spec import ArmSpec
from pytest_fp8.case import Case
from pytest_fp8.codes import S
from pytest_fp8.errors import SettingsError
from pytest_fp8.gpu import Gpu
from pytest_fp8.plain import to_plain
from pytest_fp8.plan import REFERENCE, Asking, TwoArms
from pytest_fp8.questions.asks import fp8_layers, layers_of
from pytest_fp8.questions.layers.check import check_layers
from pytest_fp8.questions.speed.causes import disturbance
from pytest_fp8.questions.speed.check import SpeedFigures
from pytest_fp8.questions.speed.timing import BlockTimer
from pytest_fp8.recipes import SCRIPTS
from pytest_fp8.script.judge import presence_alone
from pytest_fp8.stats.estimate import ratios_by_process
from pytest_fp8.stats.looks import BESIDE, Outcome, against_base
from pytest_fp8.verdicts import Decision, Finding, Verdict

Sides = tuple[ArmEnvironment, ArmEnvironment]
"""Base and head."""
QUESTION = "same session"
TOLERANCE = 0.01
"""Loss of speed against base that fails. Host, driver and hour are the same for both sides, so it can be finer than a
stored baseline's: see ``python -m benchmarks.gate``."""


@dataclass(frozen=True)
class Model:
    """A user's own model as both sides get it; empty for one of the suite."""

    shipped: str | None = None
    identity: str = ""


@dataclass(frozen=True)
class Comparison:
    """What was measured of one case, and the verdict on head."""

    case: str
    decision: Decision
    fp8: Outcome | None = None
    bf16: Outcome | None = None
    step_ms: Mapping[str, float] = field(default_factory=dict)
    """Median milliseconds per step of ``base fp8``, ``head fp8``, ``base bf16`` and ``head bf16``."""


def environments(base: str, head: str, project: Path, held: ExitStack) -> Sides:
    """Both sides, each a git revision, or empty for what is here; checkouts live as long as ``held``. Raises
    :class:`SettingsError`."""

    def side(name: str, revision: str) -> ArmEnvironment:
        root = held.enter_context(checkout(revision, project)) if revision else project
        return side_at(name, root, project)

    return side("base", base), side("head", head)


def require_gpu(cases: Sequence[Case]) -> Gpu:
    """The GPU that answers for these cases; raises :class:`SettingsError` where none can: speed is a GPU's question."""
    from pytest_fp8.gpu import detect

    gpu, absent = detect()
    emulated = next((case.id for case in cases if case.emulated), "")
    if emulated or gpu is None:
        raise SettingsError(
            S.NO_GPU,
            f"case {emulated or cases[0].id} cannot be compared for speed here",
            expected="a GPU, and a case that runs on it",
            seen="FP8 emulated on the CPU, at no speed that means anything" if emulated else absent,
            next_step="run the same command on a GPU machine"
            + (f", with --case {emulated.removesuffix('-emulated')}" if emulated else ""),
        )
    return gpu


def compare(
    pool: ArmPool,
    case: Case,
    model: Model,
    sides: Sides,
    tolerance: float | None = None,
    with_bf16: bool = False,
    cases: int = 1,
) -> Comparison:
    """Measure one case on both sides, with the arms of a pool, which ends every other arm that it has. ``tolerance``:
    by default :data:`TOLERANCE`, or the case's own where that is finer. Raises :class:`ArmError` where an arm cannot be
    built or dies."""
    allowed = min(TOLERANCE, case.tolerance) if tolerance is None else tolerance

    def decide(timer: BlockTimer) -> Outcome:
        return against_base(ratios_by_process(timer.reference, timer.other), allowed, cases)

    arms = _arms(case, pool, sides, model)
    timer = BlockTimer(arms)
    same_attention = arms.run(lambda: _looks(timer, decide))
    fp8, bf16, disturbed = decide(timer), None, disturbance(timer.beside)
    times = {"base fp8": _median(timer.reference), "head fp8": _median(timer.other)}
    unsound = _unsound(case, arms)
    if with_bf16 and case.backend != "bf16":
        references = _arms(case.reference(), pool, sides, model)
        beside = BlockTimer(references)
        references.run(lambda: beside.measure(BESIDE.pairs[0], BESIDE.blocks))
        bf16 = decide(beside)
        times |= {"base bf16": _median(beside.reference), "head bf16": _median(beside.other)}
        disturbed = disturbed or disturbance(beside.beside)
    wrong = disturbed or unsound
    found = wrong if wrong is not None else judge(fp8, bf16, allowed, same_attention)
    return Comparison(case.id, found.answer(QUESTION), fp8, bf16, times)


def _looks(timer: BlockTimer, decide: Callable[[BlockTimer], Outcome]) -> Asking[bool]:
    """Blocks of fresh pairs of processes, more of them while they leave it open. Tells if both sides ran the same
    attention kernels."""
    for pairs in BESIDE.pairs:
        yield from timer.measure(pairs, BESIDE.blocks, layers_of)
        # Asked once, after the first blocks: profiling slows a process. Later looks add fresh ones.
        base, head = (yield from layers_of(REFERENCE)), (yield from fp8_layers())
        if decide(timer).verdict is not Verdict.INCONCLUSIVE:
            break
    return base.attention == head.attention


def judge(fp8: Outcome, bf16: Outcome | None, tolerance: float, same_attention: bool) -> Finding:
    """The verdict on head's FP8 arm, with its cause. Pure."""
    low, high = fp8.estimate.change_interval
    whose, pairs = _whose(fp8, bf16), len(fp8.estimate.each)
    seen = f"{fp8.estimate.change:+.2%} [{low:+.2%}, {high:+.2%}] over {pairs} pairs of fresh processes"
    expected = f"head's FP8 step at most {tolerance:.1%} slower than base's"
    if fp8.verdict is Verdict.FAIL:
        other = "" if same_attention else "the sides ran different attention kernels; "
        cause = f"{other}the project's own code changed between base and head"
        step = "change one thing at a time and compare again"
        headline = "head is slower than base in FP8" + whose
        return Finding(S.SLOWER_THAN_BASE, fp8.verdict, headline, expected, seen, cause, step)
    if fp8.verdict is Verdict.INCONCLUSIVE:
        cause = "the true change lies at the tolerance, or the processes spread"
        step = "run again on a quiet GPU, or with another --tolerance"
        return Finding(S.UNDECIDED, fp8.verdict, "the blocks do not decide", expected, seen, cause, step)
    how = "slower than base's, within the tolerance" if high < 0 else "as fast as base's"
    how = "faster than base's" if low > 0 else how
    return Finding(None, Verdict.PASS, f"head's FP8 step is {how}{whose}", expected, seen)


def _whose(fp8: Outcome, bf16: Outcome | None) -> str:
    """Whether a change that is more than noise is FP8's own, or BF16's too."""
    if bf16 is None or abs(fp8.estimate.theta) <= fp8.estimate.half_width:
        return ""
    own = fp8.estimate.less(bf16.estimate)
    if abs(own.theta) <= own.half_width:
        return f"; BF16 changed as much ({bf16.estimate.change:+.2%}): common to both precisions, not FP8's own"
    return f"; BF16 changed by {bf16.estimate.change:+.2%}: {own.change:+.2%} is FP8's own"


def _arms(case: Case, pool: ArmPool, sides: Sides, model: Model) -> TwoArms:
    """One case's arms in both environments, alive: base's is the reference, head's the other."""
    digest = case.digest(model.identity)
    base, head = (Arm(f"{digest}@{side.name}", ArmSpec(case, "cuda", model.shipped), pool, side) for side in sides)
    arms = TwoArms(case, pool, base, head)
    arms.start()
    return arms


def _unsound(case: Case, arms: TwoArms) -> Finding | None:
    """What is wrong with FP8 in head's arm, or ``None``."""
    if case.backend == "bf16":
        return None
    found = arms.run(presence_alone) if case.backend in SCRIPTS else check_layers(case, arms.run(fp8_layers))
    return replace(found, headline=f"in head {found.headline}") if found.verdict is Verdict.FAIL else None


def _median(arms: Sequence[Sequence[float]]) -> float:
    return median(time for process in arms for time in process)


def with_base(stored: Decision, compared: Comparison) -> Decision:
    """The comparison with base decides; the stored baseline is the coarse guard behind it, against slow creep. Pure.

    A FAIL or INVALID of the stored one stands. What it leaves open, the comparison answers; so it does on a host of
    which the stored figures say nothing.
    """
    decision = compared.decision
    figures = stored.figures
    if isinstance(figures, SpeedFigures):
        figures = replace(figures, base=to_plain(compared))
    if stored.verdict in (Verdict.FAIL, Verdict.INVALID) and stored.code is not S.OTHER_REFERENCE:
        return replace(stored, figures=figures)
    seen = f"{decision.seen or decision.headline} against base; against the stored baseline: {stored.headline}"
    headline = f"{decision.headline}; {seen}" if decision.verdict is Verdict.PASS else decision.headline
    return replace(decision, question=stored.question, headline=headline, seen=seen, figures=figures)
