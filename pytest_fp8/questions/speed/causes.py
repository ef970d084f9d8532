"""Why FP8 is slow, slower than before, or undecided: from scatter, compilation and the GPU's own times. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pytest_fp8.codes import S
from pytest_fp8.questions.speed.account import Account, ArmAccount, launch_bound_arms
from pytest_fp8.questions.speed.evidence import TimingEvidence
from pytest_fp8.questions.speed.host import Turn, Why, scattered, short_of_memory
from pytest_fp8.questions.speed.sound import NOTICED
from pytest_fp8.questions.speed.wire import slow_wire
from pytest_fp8.stats.estimate import Estimate

MOST_NAMED = 3
"""How many kernels a message names."""


def why_undecided(evidence: TimingEvidence, change: Estimate, against_history: bool) -> Why:
    """Where the interval contains the bound: times that scatter, sessions that differ, or a small difference."""
    if blocks := scattered(evidence.bf16, evidence.fp8):
        cause, next_step = (
            f"the host: {blocks}",
            "run again where the host has less to do; a larger batch lets the GPU decide",
        )
        return Why(S.HOST_SCATTERS, cause, next_step)
    if against_history:
        own = change.own_error
        sessions = math.sqrt(change.error**2 - own**2)
        if 0 < own < sessions:
            return Why(
                S.SESSIONS_DIFFER,
                f"sessions on other machines differ by {sessions:.2%} from the baseline's, this session's processes "
                f"by {own:.2%}: more of them would not decide",
                "pytest-fp8 compare measures base and head in one session, where that cancels; or store further "
                "sessions with --fp8-update",
            )
    return Why(
        S.UNDECIDED,
        "a difference as small as the noise",
        "run again on a quiet GPU; if it stays, the true value lies at the bound",
    )


def why_busy(account: Account | None) -> str:
    """Why busy times are judged."""
    waiting = launch_bound_arms(account)
    if waiting:
        return f"since {waiting[0]} waits for the host" if len(waiting) == 1 else "since both arms wait for the host"
    return "since the host held up steps, here or when the baseline was stored"


def why_slow(account: Account | None, compiled: bool, turns: Sequence[Turn] = ()) -> Why:
    """From what the GPU did in both arms. ``compiled``: whether the FP8 arm is. ``turns``: those that were timed."""
    waits = launch_bound(account.fp8) if account is not None else ""
    if account is not None and waits:
        if short := short_of_memory(turns, "FP8"):
            return short
        cause = f"{waits}; in its work alone FP8 is {account.busy_speedup:.2f}x"
        return Why(S.LAUNCH_BOUND, cause, "a larger batch, CUDA graphs, or compile the model")
    if not compiled:
        cause = "the FP8 arm was not compiled: each cast then is a kernel of its own that reads and writes memory"
        return Why(S.NOT_COMPILED, cause, "compile the model; torchao's FP8 is meant to be compiled")
    wire = slow_wire(account.bf16.wire, account.fp8.wire, NOTICED * account.bf16.step) if account is not None else None
    if wire:
        return wire
    if account is not None and account.earned < NOTICED * account.bf16.step:
        cause = "FP8's products are hardly faster than BF16's: too small for FP8, or too few of them"
        return Why(S.TOO_SMALL, cause, "a larger batch or wider layers; leave the small layers in BF16")
    cause = "products too small for FP8 to pay, or a recipe whose scaling costs more than it saves"
    if account is not None and account.casts > NOTICED * account.bf16.step and account.grown():
        had = {kernel.name for kernel in account.bf16.rest}
        most = "; ".join(
            f"{k.name} {k.milliseconds:+.1f} ms in {k.count}" + ("" if k.name in had else ", not in BF16's step")
            for k in account.grown()[:MOST_NAMED]
        )
        cause += f". Casts and other kernels take {account.casts:.1f} ms longer than BF16's; the most: {most}"
    return Why(S.COSTS_MORE_THAN_IT_SAVES, cause, "try a larger batch, or a cheaper recipe (tensorwise, delayed)")


def launch_bound(arm: ArmAccount) -> str:
    """The cause for an arm that waits for the host. Empty where it hardly waits."""
    if not arm.launch_bound:
        return ""
    step = f"{arm.step:.1f}" if arm.slow_step - arm.step < 0.1 else f"{arm.step:.1f} to {arm.slow_step:.1f}"
    return f"launch-bound: the GPU works {arm.busy:.1f} ms of each {step} ms step and waits for the host"
