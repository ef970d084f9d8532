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
from pytest_fp8.rules.speed import Speedup
from pytest_fp8.verdicts import Finding, Verdict


def why_undecided(evidence: TimingEvidence, result: Speedup, account: Account | None) -> Why:
    """Where the interval contains the bound: times that scatter, sessions that differ, or a small
    difference."""
    slow = scattered(evidence.bf16, evidence.fp8, evidence.turns)
    if account is not None and slow.arm in launch_bound_arms(account):
        busy = (account.fp8 if slow.arm == "FP8" else account.bf16).busy
        seen = f"the host: {slow.blocks}, where the GPU works {busy:.1f} ms in {slow.arm}'s"
        return Why(
            S.HOST_SCATTERS,
            "; ".join(filter(None, (seen, slow.host))),
            "run again where the host has less to do; a larger batch lets the GPU decide",
        )
    if result.change is not None:
        own = result.change.own_error
        sessions = math.sqrt(result.change.error**2 - own**2)
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


FUSED = "triton_per_"
"""How torch's compiler names a reduction whose rows it holds whole. Two that it fuses, one along the rows and one along
the columns of a tensor, are such kernels. On H200s one of them, new in FP8's step, took 62 ms of 630 at 8B with 8192
tokens, and was gone with ``TORCHINDUCTOR_MIX_ORDER_REDUCTION=0`` (docs/findings.md). Sound ones take 1 % at most."""
MOST_NAMED = 3
"""How many kernels a message names."""


def slower_by_the_host(account: Account | None, seen: str, against: str) -> Finding | None:
    """Why a loss of step time against the baseline is not held against FP8, or ``None``: an arm waits for its host, and
    the baseline has no busy times, which alone could tell a slow host from slow FP8."""
    if account is None or not launch_bound_arms(account):
        return None
    waits = launch_bound(account.fp8) or launch_bound(account.bf16)
    return Finding(
        S.NO_BUSY_TIMES,
        Verdict.INVALID,
        headline="an arm waits for its host, and the baseline has step times alone",
        expected=against,
        seen=seen,
        cause=f"{waits}: a host slower or busier than the baseline's, or code in the step that makes the GPU wait",
        next_step='store busy times, too: --fp8-update="busy times"; or a larger batch',
    )


def why_busy(account: Account | None, waits: bool) -> str:
    """Why busy times are judged. ``waits``: whether an arm waits for its host or did; else steps scatter by it."""
    waiting = launch_bound_arms(account)
    if waiting:
        return f"since {waiting[0]} waits for the host" if len(waiting) == 1 else "since both arms wait for the host"
    if not waits:
        return "since step times scatter by the host"
    return "since an arm has waited for the host, or steps scattered by it, in this session or in a stored one"


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
    cheaper = "try a larger batch, or a cheaper recipe (tensorwise, delayed)"
    fused = fused_reduction(account) if account is not None else ""
    return Why(S.COSTS_MORE_THAN_IT_SAVES, cause, f"{cheaper}; {fused}" if fused else cheaper)


def fused_reduction(account: Account) -> str:
    """What to try where FP8's step has a fused reduction that BF16's has not, and it takes long. Empty elsewhere."""
    had = {kernel.name for kernel in account.bf16.rest}
    new = [kernel for kernel in account.grown() if kernel.name.startswith(FUSED) and kernel.name not in had]
    if not new or new[0].milliseconds < NOTICED * account.bf16.step:
        return ""
    return (
        f"one kernel of the compiler's, {new[0].name}, takes {new[0].milliseconds:.1f} ms of FP8's "
        f"{account.fp8.step:.1f} ms step, and BF16 has none like it: most likely two reductions that torch fused; try "
        "TORCHINDUCTOR_MIX_ORDER_REDUCTION=0"
    )


def launch_bound(arm: ArmAccount) -> str:
    """The cause for an arm that waits for the host. Empty where it hardly waits."""
    if not arm.launch_bound:
        return ""
    step = f"{arm.step:.1f}" if arm.slow_step - arm.step < 0.1 else f"{arm.step:.1f} to {arm.slow_step:.1f}"
    return f"launch-bound: the GPU works {arm.busy:.1f} ms of each {step} ms step and waits for the host"
