"""Why FP8 is slow, slower than before, or undecided: from scatter, compilation and the GPU's own times. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pytest_fp8.codes import S
from pytest_fp8.questions.speed.account import Account, ArmAccount, launch_bound_arms
from pytest_fp8.questions.speed.evidence import TimingEvidence
from pytest_fp8.questions.speed.host import Turn, scattered, short_of_memory
from pytest_fp8.questions.speed.sound import NOTICED
from pytest_fp8.questions.speed.wire import slow_wire
from pytest_fp8.stats.estimate import Estimate

MOST_NAMED = 3
"""How many kernels a message names."""


Why = tuple[S, str]
"""A code, and the cause where the code's page says none."""


def why_undecided(evidence: TimingEvidence, change: Estimate, against_history: bool) -> Why:
    """Where the interval contains the bound: times that scatter, sessions that differ, or a small difference."""
    if blocks := scattered(evidence.bf16, evidence.fp8):
        return S.HOST_SCATTERS, f"the host: {blocks}"
    own = change.own_error
    sessions = math.sqrt(max(0.0, change.error**2 - own**2))
    if against_history and 0 < own < sessions:
        return (
            S.SESSIONS_DIFFER,
            f"sessions on other machines differ by {sessions:.2%} from the baseline's, this session's processes "
            f"by {own:.2%}: more of them would not decide",
        )
    return S.UNDECIDED, ""


def why_busy(account: Account | None) -> str:
    """Why busy times are judged."""
    waiting = launch_bound_arms(account)
    if waiting:
        return f"since {waiting[0]} waits for the host" if len(waiting) == 1 else "since both arms wait for the host"
    return "since the host held up steps, here or when the baseline was stored"


def why_slow(account: Account | None, compiled: bool, turns: Sequence[Turn] = ()) -> Why:
    """From what the GPU did in both arms. ``compiled``: whether the FP8 arm is. ``turns``: those that were timed."""
    if account is not None and (waits := launch_bound(account.fp8)):
        if short := short_of_memory(turns, "FP8"):
            return S.SHORT_OF_MEMORY, short
        return S.LAUNCH_BOUND, f"{waits}; in its work alone FP8 is {account.busy_speedup:.2f}x"
    if not compiled:
        return S.NOT_COMPILED, ""
    cause = "products too small for FP8 to pay, or a recipe whose scaling costs more than it saves"
    if account is None:
        return S.COSTS_MORE_THAN_IT_SAVES, cause
    noticed = NOTICED * account.bf16.step
    if wire := slow_wire(account.bf16.wire, account.fp8.wire, noticed):
        return S.SLOW_WIRE, wire
    if account.earned < noticed:
        return S.TOO_SMALL, ""
    if account.casts > noticed and account.grown():
        had = {kernel.name for kernel in account.bf16.rest}
        most = "; ".join(
            f"{k.name} {k.milliseconds:+.1f} ms in {k.count}" + ("" if k.name in had else ", not in BF16's step")
            for k in account.grown()[:MOST_NAMED]
        )
        cause += f". Casts and other kernels take {account.casts:.1f} ms longer than BF16's; the most: {most}"
    return S.COSTS_MORE_THAN_IT_SAVES, cause


def launch_bound(arm: ArmAccount) -> str:
    """The cause for an arm that waits for the host. Empty where it hardly waits."""
    if not arm.launch_bound:
        return ""
    step = f"{arm.step:.1f}" if arm.slow_step - arm.step < 0.1 else f"{arm.step:.1f} to {arm.slow_step:.1f}"
    return f"launch-bound: the GPU works {arm.busy:.1f} ms of each {step} ms step and waits for the host"
