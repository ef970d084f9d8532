"""A case's FP8 arm beside that of base: both commits alternate on one GPU, and no stored baseline is needed.

Host, driver, power limit and the hour are the same for both sides, so that they cancel.
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
from pytest_fp8.plain import to_plain
from pytest_fp8.plan import REFERENCE, Asking, TwoArms
from pytest_fp8.questions.asks import fp8_layers, layers_of
from pytest_fp8.questions.findings import finding
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
class Comparison:
    """What was measured of one case, and the verdict on head."""

    decision: Decision
    fp8: Outcome | None = None
    step_ms: Mapping[str, float] = field(default_factory=dict)
    """Median milliseconds per step of ``base`` and ``head``."""


def environments(base: str, project: Path, held: ExitStack) -> Sides:
    """A git revision, and what is here; the checkout lives as long as ``held``. Raises :class:`SettingsError`."""
    root = held.enter_context(checkout(base, project))
    return side_at("base", root, project), side_at("head", project, project)


def compare(pool: ArmPool, case: Case, model: tuple[str | None, str], sides: Sides, cases: int = 1) -> Comparison:
    """Measure one case on both sides, with the arms of a pool, which ends every other arm that it has. ``model``: the
    user's own as text, and its identity. Raises :class:`ArmError` where an arm cannot be built or dies."""
    allowed = min(TOLERANCE, case.tolerance)
    shipped, identity = model
    digest = case.digest(identity)
    base, head = (Arm(f"{digest}@{side.name}", ArmSpec(case, "cuda", shipped), pool, side) for side in sides)
    arms = TwoArms(case, pool, base, head)
    arms.start()
    timer = BlockTimer(arms)

    def decide() -> Outcome:
        return against_base(ratios_by_process(timer.reference, timer.other), allowed, cases)

    same_attention = arms.run(lambda: _looks(timer, decide))
    fp8 = decide()
    found = disturbance(timer.beside)
    if found is None:
        found = _unsound(case, arms)
    if found is None:
        found = judge(fp8, allowed, same_attention)
    times = {"base": _median(timer.reference), "head": _median(timer.other)}
    return Comparison(found.answer(QUESTION), fp8, times)


def _looks(timer: BlockTimer, decide: Callable[[], Outcome]) -> Asking[bool]:
    """Blocks of fresh pairs of processes, more of them while they leave it open. Tells if both sides ran the same
    attention kernels."""
    for pairs in BESIDE.pairs:
        yield from timer.measure(pairs, BESIDE.blocks, layers_of)
        # Asked once, after the first blocks: profiling slows a process. Later looks add fresh ones.
        base, head = (yield from layers_of(REFERENCE)), (yield from fp8_layers())
        if decide().verdict is not Verdict.INCONCLUSIVE:
            break
    return base.attention == head.attention


def judge(fp8: Outcome, tolerance: float, same_attention: bool) -> Finding:
    """The verdict on head's FP8 arm, with its cause. Pure."""
    low, high = fp8.estimate.change_interval
    pairs = len(fp8.estimate.each)
    seen = f"{fp8.estimate.change:+.2%} [{low:+.2%}, {high:+.2%}] over {pairs} pairs of fresh processes"
    expected = f"head's FP8 step at most {tolerance:.1%} slower than base's"
    if fp8.verdict is Verdict.FAIL:
        cause = "" if same_attention else "the sides ran different attention kernels"
        return finding(S.SLOWER_THAN_BASE, expected, seen, cause=cause)
    if fp8.verdict is Verdict.INCONCLUSIVE:
        return finding(S.UNDECIDED, expected, seen, fp8.verdict, against="base")
    how = "faster than" if low > 0 else "slower, within the tolerance, than" if high < 0 else "as fast as"
    return Finding(None, Verdict.PASS, f"head's FP8 step is {how} base's", expected, seen)


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
