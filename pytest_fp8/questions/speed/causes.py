"""Why a speedup is no answer, why FP8 is slow, and why a change stays open: one cause after another. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from statistics import median

from pytest_fp8.codes import S
from pytest_fp8.questions.findings import finding
from pytest_fp8.questions.layers.evidence import LayersEvidence
from pytest_fp8.questions.layers.kernels import kernel_family
from pytest_fp8.questions.speed.account import IDLE, LOST, Account, ArmAccount, ArmWire
from pytest_fp8.questions.speed.evidence import TimingEvidence
from pytest_fp8.questions.speed.timing import Beside, scatters
from pytest_fp8.stats.estimate import Estimate
from pytest_fp8.verdicts import Finding, Verdict

BAND = 0.08
"""How far the reference's own step time may lie, in log, from that of the nearest session of its baseline. Eleven H200s
took 118.1 to 125.3 ms for one and the same step of 1B: two of them lie more than 8 % apart in one of 200 pairs."""
ABOVE = 0.05
"""How far a speedup may lie above its limit. Hosts of one kind differ by up to 5 %, and the profiled step is one step.
On H200s healthy recipes reach 48 to 67 % of the way to their limit; BF16 against BF16 lies within 1 %."""
SHRUNK = 0.30
"""Share of itself by which a class of kernels that FP8 does not touch may shrink: attention takes up to 7 % less at the
higher clocks that FP8 leaves it on an H200, the optimizer up to 3 %."""
NOTICED = 0.02
"""What is less than this share of the reference's step is not looked at."""
UNTOUCHED = {
    "attention": "another sequence length, mask or batch in the FP8 arm",
    "optimizer": "the FP8 arm's optimizer does not step, holds fewer weights, or is of another kind",
    "communication": "the FP8 arm sends less",
    "other products": "a smaller batch, fewer layers or no recomputation in the FP8 arm",
}
"""Classes of kernels that FP8 leaves as they are, and why the FP8 arm may have less of one."""
MOST_NAMED = 3
"""How many kernels a message names."""
NO_ROOM = "a smaller batch or seq in both arms, or a GPU with more memory"


# -- no answer --------------------------------------------------------------------------------------------------------


def unsound(
    evidence: TimingEvidence,
    account: Account | None,
    bf16_ms: float,
    baseline_ms: Sequence[Sequence[float]],
    lowest: float,
    on_busy: bool,
) -> Finding | None:
    """Why the blocks, or the difference of the arms, say nothing of FP8; or ``None``.

    ``account``: ``None`` where no step was profiled. ``baseline_ms``: BF16's step times stored in the baseline, not
    asked where busy time is judged. ``lowest``: the lower bound of the speedup, of busy time or (``on_busy`` false) of
    step time.
    """
    found = (
        disturbance(evidence.beside)
        or _other_attention(evidence)
        or _other_reference(bf16_ms, () if on_busy else baseline_ms)
        or _compiled(evidence.beside)
    )
    if found is not None or account is None:
        return found
    return _less_work(account) or _reference_waits(account, evidence) or _above_limit(account, lowest, on_busy)


def _invalid(code: S, expected: str, seen: str, cause: str = "") -> Finding:
    return finding(code, expected, seen, Verdict.INVALID, cause=cause)


def disturbance(beside: Beside) -> Finding | None:
    """Why no block can be used, or ``None``."""
    if beside.strangers:
        return _invalid(S.OTHER_PROCESS, "the GPU for this session alone", f"process ids {beside.strangers}")
    if beside.throttles:
        seen, clocks = ", ".join(beside.throttles), beside.clocks
        seen += f"; SM clocks of {min(clocks)} to {max(clocks)} MHz" if clocks else ""
        return _invalid(S.THROTTLED, "no clock throttling", seen)
    return None


def _other_attention(evidence: TimingEvidence) -> Finding | None:
    bf16, fp8 = (attention_families(step) for step in (evidence.bf16_step, evidence.fp8_step))
    if bf16 == fp8:
        return None
    cause = "one arm lost its fast attention path, so the ratio measures attention and not FP8"
    if evidence.bf16_cudnn != evidence.fp8_cudnn:
        one, two = (each or "one that torch was not built for" for each in (evidence.bf16_cudnn, evidence.fp8_cudnn))
        cause = f"two cuDNN libraries: {one} in the reference, {two} in the FP8 arm"
    expected = f"the same kernels in both arms; FP8 ran {', '.join(fp8) or 'none'}"
    return _invalid(S.OTHER_ATTENTION, expected, f"the reference ran {', '.join(bf16) or 'none'}", cause)


def attention_families(step: LayersEvidence | None) -> list[str]:
    """Families of the kernels, whatever operator launched them. One kernel is reached through
    ``scaled_dot_product_attention`` in an eager arm and through cuDNN's own operator in a compiled one."""
    launched = step.attention.values() if step is not None else ()
    return sorted({kernel_family(kernel) for kernels in launched for kernel in kernels})


def _other_reference(bf16_ms: float, baseline_ms: Sequence[Sequence[float]]) -> Finding | None:
    stored = sorted(median(session) for session in baseline_ms)
    if not stored or min(abs(math.log(bf16_ms / each)) for each in stored) <= BAND:
        return None
    sessions = f"{stored[0]:.2f}" if len(stored) == 1 else f"{stored[0]:.2f} to {stored[-1]:.2f}"
    expected = f"{sessions} ms a step +-{BAND:.0%}, as in {len(stored)} stored session(s)"
    return _invalid(S.OTHER_REFERENCE, expected, f"{bf16_ms:.2f} ms")


def _compiled(beside: Beside) -> Finding | None:
    counts = {arm: sum(t.compilations for t in beside.turns if t.arm == arm) for arm in ("BF16", "FP8")}
    seen = [f"{count} in the {arm} arm" for arm, count in counts.items() if count]
    if not seen:
        return None
    expected = "every compilation in the steps before them"
    return _invalid(S.COMPILED_WHILE_TIMED, expected, f"torch.compile compiled {', '.join(seen)}")


def _less_work(account: Account) -> Finding | None:
    """A class of kernels that FP8 leaves alone, and of which the FP8 arm has much less."""
    for name, cause in UNTOUCHED.items():
        before = account.uncovered if name == "other products" else account.bf16.classes.get(name, 0.0)
        less = -account.difference(name)
        if name == "other products" and account.hidden:
            continue
        if name == "communication" and not sends_less(account.bf16.wire, account.fp8.wire):
            continue
        if less > SHRUNK * before and less > NOTICED * account.bf16.busy:
            seen = f"{name}: {before:.1f} ms a step in BF16, {before - less:.1f} ms in FP8{_flops(account)}"
            expected = "arms that differ in products that run in FP8 and in nothing else"
            return _invalid(S.LESS_WORK, expected, seen, cause)
    return None


def sends_less(bf16: ArmWire, fp8: ArmWire) -> bool:
    """Whether a share of ``SHRUNK`` of the reference's numbers is missing on the FP8 arm's wire; true where profiles do
    not count them. Fewer bytes are no less work: FP8 weights that are gathered have half of BF16's."""
    before, now = bf16.elements, fp8.elements
    return before is None or now is None or now < (1 - SHRUNK) * before


def _flops(account: Account) -> str:
    lost = account.lost_flops
    return f"; the FP8 arm's products have {lost:.0%} fewer FLOPs" if lost > LOST else ""


def _reference_waits(account: Account, evidence: TimingEvidence) -> Finding | None:
    """The host holds the reference up and not the FP8 arm: by a wait that only the reference's step has, or so long
    that one arm is launch-bound and the other is not."""
    waited, fp8 = account.bf16, account.fp8
    # In its fastest blocks, too: what a busy host does now and then is not in them.
    times = sorted(time for process in evidence.bf16 for time in process)
    idle = waited.idle - max(0.0, waited.step - times[len(times) // 10])
    more_waits = sum(waited.waits.values()) > sum(fp8.waits.values())
    by_its_calls = more_waits and idle - fp8.idle > NOTICED * waited.step
    if not by_its_calls and not (idle > IDLE * waited.step and fp8.idle_share < IDLE / 2):
        return None
    calls = ", ".join(f"{name} {count} times" for name, count in waited.waits.items())
    found = _invalid(
        S.REFERENCE_WAITS,
        "a reference as fast as the GPU lets it be",
        f"the GPU idles {waited.idle:.1f} ms of the reference's {waited.step:.1f} ms step and {fp8.idle:.1f} ms of the "
        f"FP8 arm's {fp8.step:.1f} ms" + (f"; the reference's step calls {calls}" if calls else ""),
        "the reference alone waits for the GPU in each step: .item() or print() of a loss, a copy to the CPU"
        if more_waits
        else "Python takes time in the reference's step alone: a sleep, loading of data, code that is not compiled",
    )
    if short := evidence.beside.short_of_memory("BF16"):
        return replace(found, code=S.SHORT_OF_MEMORY, cause=short, next_step=NO_ROOM)
    return found


def _above_limit(account: Account, lowest: float, on_busy: bool) -> Finding | None:
    """Of busy time where an arm waits for its host: how long it waits is no matter of FP8."""
    if not on_busy and account.launch_bound:
        on_busy, lowest = True, account.busy_speedup
    limit = account.busy_limit if on_busy else account.limit
    if lowest <= limit * (1 + ABOVE):
        return None
    shrunk = {name: -account.difference(name) for name in (*UNTOUCHED, "rest")}
    shrunk["idle time"] = 0.0 if on_busy else account.bf16.idle - account.fp8.idle
    what = max(shrunk, key=lambda name: shrunk[name])
    named = {"rest": "all other kernels"}.get(what, what)
    return _invalid(
        S.TOO_GOOD,
        f"at most {limit:.2f}x: products in FP8 earned {account.earned:.1f} ms of the reference's "
        f"{account.bf16.step:.1f} ms step",
        f"at least {lowest:.2f}x{' of busy time' if on_busy else ''}; {named}: {shrunk[what]:.1f} ms less in "
        f"the FP8 arm{_flops(account)}",
        "the reference's host holds it up, and the FP8 arm's does not"
        if what == "idle time"
        else "the FP8 arm does less work (a smaller batch, fewer layers), or has faster kernels that are not FP8's",
    )


# -- slow, or open ----------------------------------------------------------------------------------------------------

Why = tuple[S, str]
"""A code, and the cause where the code's page says none."""


def why_undecided(evidence: TimingEvidence, change: Estimate, against_history: bool) -> Why:
    """Where the interval contains the bound: times that scatter, sessions that differ, or a small difference."""
    if any(map(scatters, evidence.bf16, evidence.fp8)):
        blocks = {"FP8": list(chain(*evidence.fp8)), "BF16": list(chain(*evidence.bf16))}
        told = ", ".join(f"{arm}'s blocks {min(x):.1f} to {max(x):.1f} ms a step" for arm, x in blocks.items())
        return S.HOST_SCATTERS, f"the host: {told}"
    own = change.own_error
    sessions = math.sqrt(max(0.0, change.error**2 - own**2))
    if against_history and 0 < own < sessions:
        return (
            S.SESSIONS_DIFFER,
            f"sessions on other machines differ by {sessions:.2%} from the baseline's, this session's processes "
            f"by {own:.2%}: more of them would not decide",
        )
    return S.UNDECIDED, ""


def why_slow(account: Account | None, evidence: TimingEvidence) -> Why:
    """From what the GPU did in both arms."""
    if account is not None and (waits := launch_bound(account.fp8)):
        if short := evidence.beside.short_of_memory("FP8"):
            return S.SHORT_OF_MEMORY, short
        return S.LAUNCH_BOUND, f"{waits}; in its work alone FP8 is {account.busy_speedup:.2f}x"
    if not evidence.fp8_compiled:
        return S.NOT_COMPILED, ""
    cause = "products too small for FP8 to pay, or a recipe whose scaling costs more than it saves"
    if account is None:
        return S.COSTS_MORE_THAN_IT_SAVES, cause
    noticed = NOTICED * account.bf16.step
    if wire := _slow_wire(account.bf16.wire, account.fp8.wire, noticed):
        return S.SLOW_WIRE, wire
    if account.casts > noticed and account.grown():
        had = {kernel.name for kernel in account.bf16.rest}
        most = "; ".join(
            f"{k.name} {k.milliseconds:+.1f} ms in {k.count}" + ("" if k.name in had else ", not in BF16's step")
            for k in account.grown()[:MOST_NAMED]
        )
        cause += f". Casts and other kernels take {account.casts:.1f} ms longer than BF16's; the most: {most}"
    return S.COSTS_MORE_THAN_IT_SAVES, cause


def _slow_wire(bf16: ArmWire, fp8: ArmWire, noticed: float) -> str:
    """How FP8 is slow where collectives that nothing hides hold it up for ``noticed`` milliseconds more than BF16."""
    if fp8.exposed - bf16.exposed < noticed:
        return ""
    longer = fp8.milliseconds - bf16.milliseconds
    what = "have less to hide behind, since products are faster"
    if longer >= noticed:
        what = f"take {longer:.1f} ms longer than BF16's"
    return f"the wire: the FP8 arm's collectives {what}; {fp8.words()}, in BF16 {bf16.words() or 'none'}"


def launch_bound(arm: ArmAccount) -> str:
    """The cause for an arm that waits for the host. Empty where it hardly waits."""
    waits = f"launch-bound: the GPU works {arm.busy:.1f} ms of each {arm.step:.1f} ms step and waits for the host"
    return waits if arm.launch_bound else ""
