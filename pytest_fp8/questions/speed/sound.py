"""Is a speedup one of FP8? What the arms' accounts say against it: other work, another precision, a wait. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pytest_fp8.codes import S
from pytest_fp8.questions.findings import some
from pytest_fp8.questions.layers.products import Extents, Product
from pytest_fp8.questions.speed.account import IDLE, LOST, Account, launch_bound_arms
from pytest_fp8.questions.speed.evidence import TimingEvidence
from pytest_fp8.questions.speed.host import Why, short_of_memory
from pytest_fp8.questions.speed.wire import sends_less
from pytest_fp8.verdicts import Finding, Verdict

ABOVE = 0.05
"""How far a speedup may lie above its limit. Hosts of one kind differ by up to 5 %, and the profiled step is one step.
On H200s healthy recipes reach 48 to 67 % of the way to a limit of 1.31x to 1.44x; BF16 against BF16 lies within 1 %."""
SHRUNK = 0.30
"""Share of itself by which a class of kernels that FP8 does not touch may shrink: attention takes up to 7 % less at the
higher clocks that FP8 leaves it on an H200, the optimizer up to 3 %."""
NOTICED = 0.02
"""What is less than this share of the reference's step is not looked at."""
HIGH = ("float32", "bfloat16", "float16", "float64")
OTHER_RATE = 1.5
"""Two kernels for one product in one precision are not further apart; TF32 is some eight times FP32's rate."""
UNTOUCHED = {
    "attention": "another sequence length, mask or batch in the FP8 arm",
    "optimizer": "the FP8 arm's optimizer does not step, holds fewer weights, or is of another kind",
    "communication": "the FP8 arm sends less",
    "other products": "a smaller batch, fewer layers or no recomputation in the FP8 arm",
}
"""Classes of kernels that FP8 leaves as they are, and why the FP8 arm may have less of one."""


def not_fp8s_own(account: Account | None, evidence: TimingEvidence, lowest: float, on_busy: bool) -> Finding | None:
    """Why the difference of the arms is not FP8's, or ``None``.

    ``account``: ``None`` where no step was profiled. ``lowest``: the lower bound of the speedup that is asked, which is
    one of busy time or (``on_busy`` false) of step time.
    """
    found = _compiled(evidence.compilations)
    if found is not None or account is None:
        return found
    return (
        _other_precision(account, evidence.bf16_gpu.products, evidence.fp8_gpu.products)
        or _less_work(account)
        or _reference_waits(account, steady_idle(account, evidence), short_of_memory(evidence.turns, "BF16"))
        or _above_limit(account, lowest, on_busy)
    )


def _compiled(compilations: Mapping[str, int]) -> Finding | None:
    seen = [f"{count} in the {arm} arm" for arm, count in compilations.items() if count]
    if not seen:
        return None
    return Finding(
        S.COMPILED_WHILE_TIMED,
        Verdict.INVALID,
        headline="code was compiled inside the timed blocks",
        expected="every compilation in the steps before them",
        seen=f"torch.compile compiled {', '.join(seen)}",
        cause="the step changes while it is timed: a batch of another shape, a Python number that the code depends "
        "on, or torch._dynamo.reset()",
        next_step='run with TORCH_LOGS="recompiles" to see the reason; give every batch one shape',
    )


def _less_work(account: Account) -> Finding | None:
    """A class of kernels that FP8 leaves alone, and of which the FP8 arm has much less."""
    for name, cause in UNTOUCHED.items():
        before = account.uncovered if name == "other products" else account.bf16.classes.get(name, 0.0)
        less = -account.difference(name)
        if name == "other products" and account.hidden:
            continue
        if name == "communication" and not sends_less(account.bf16.wire, account.fp8.wire, SHRUNK):
            continue
        if less > SHRUNK * before and less > NOTICED * account.bf16.busy:
            seen = f"{name}: {before:.1f} ms a step in BF16, {before - less:.1f} ms in FP8"
            return _other_work(seen + _flops(account), cause)
    return None


def _other_work(seen: str, cause: str) -> Finding:
    return Finding(
        S.LESS_WORK,
        Verdict.INVALID,
        headline="the arms do not do the same work",
        expected="arms that differ in products that run in FP8 and in nothing else",
        seen=seen,
        cause=cause,
        next_step="find what the FP8 arm's conversion, precision or step does besides FP8; do it in both arms",
    )


def _flops(account: Account) -> str:
    if account.lost_flops <= LOST:
        return ""
    return f"; the FP8 arm's products have {account.lost_flops:.0%} fewer FLOPs"


def _other_precision(account: Account, bf16: Sequence[Product], fp8: Sequence[Product]) -> Finding | None:
    """Products outside FP8, of equal sizes in both arms, that have another type in the FP8 arm, or the rate of one."""
    before, after = _by_extents(bf16), _by_extents(fp8)
    types, rates, moved = [], [], 0.0
    for extents, mine in before.items():
        theirs = after.get(extents, [])
        kinds = {product.kind for product in mine}, {product.kind for product in theirs}
        if len(mine) != len(theirs) or not (kinds[0] | kinds[1]) <= set(HIGH):
            continue
        spent = [sum(product.milliseconds for product in side) for side in (mine, theirs)]
        if kinds[0] != kinds[1]:
            types.append(f"{' and '.join(sorted(kinds[0]))} in BF16's arm, {' and '.join(sorted(kinds[1]))} in FP8's")
            moved += spent[0]
        elif kinds[0] == {"float32"} and max(spent) > OTHER_RATE * min(spent):
            rates.append("float32 in both arms, and the faster arm has TF32's rate")
            moved += abs(spent[0] - spent[1])
    if moved <= NOTICED * account.bf16.busy or not (types or rates):
        return None
    return Finding(
        S.OTHER_PRECISION,
        Verdict.INVALID,
        headline="products outside FP8 run in another precision in one arm",
        expected="the same types and kernels in both arms wherever no FP8 is",
        seen=f"{some([*types, *rates])}; products of {moved:.1f} ms a step",
        cause="torch.backends.cuda.matmul.allow_tf32 or set_float32_matmul_precision() in one arm alone"
        if rates
        else "a conversion or an autocast that also changes what is no FP8 layer",
        next_step="set both arms' precision outside FP8 alike, before the model is built",
    )


def steady_idle(account: Account, evidence: TimingEvidence) -> float:
    """Milliseconds that the GPU idles in the reference's fastest blocks too: what a busy host does now and then is not
    in it."""
    times = sorted(time for process in evidence.bf16 for time in process)
    return account.bf16.idle - max(0.0, account.bf16.step - times[len(times) // 10])


def _reference_waits(account: Account, idle: float, short: Why | None) -> Finding | None:
    """The host holds the reference up and not the FP8 arm: by a wait that only the reference's step has, or so long
    that one arm is launch-bound and the other is not. ``idle``: of the reference, see :func:`steady_idle`; ``short``:
    why, where it has too little memory."""
    waited, fp8 = account.bf16, account.fp8
    more_waits = sum(waited.waits.values()) > sum(fp8.waits.values())
    by_its_calls = more_waits and idle - fp8.idle > NOTICED * waited.step
    if not by_its_calls and not (idle > IDLE * waited.step and fp8.idle_share < IDLE / 2):
        return None
    calls = ", ".join(f"{name} {count} times" for name, count in waited.waits.items())
    found = Finding(
        S.REFERENCE_WAITS,
        Verdict.INVALID,
        headline="the reference waits for its host",
        expected="a reference as fast as the GPU lets it be",
        seen=f"the GPU idles {waited.idle:.1f} ms of the reference's {waited.step:.1f} ms step and {fp8.idle:.1f} "
        f"ms of the FP8 arm's {fp8.step:.1f} ms" + (f"; the reference's step calls {calls}" if calls else ""),
        cause="the reference alone waits for the GPU in each step: .item() or print() of a loss, a copy to the CPU"
        if more_waits
        else "Python takes time in the reference's step alone: a sleep, loading of data, code that is not compiled",
        next_step="take the wait out of the reference's step, or put it in both arms",
    )
    return replace(found, **short._asdict()) if short is not None else found


def _above_limit(account: Account, lowest: float, on_busy: bool) -> Finding | None:
    """Of busy time where an arm waits for its host: how long it waits is no matter of FP8."""
    if not on_busy and launch_bound_arms(account):
        on_busy, lowest = True, account.busy_speedup
    limit = account.busy_limit if on_busy else account.limit
    if lowest <= limit * (1 + ABOVE):
        return None
    shrunk = {name: -account.difference(name) for name in (*UNTOUCHED, "rest")}
    shrunk["idle time"] = 0.0 if on_busy else account.bf16.idle - account.fp8.idle
    what = max(shrunk, key=lambda name: shrunk[name])
    named = {"rest": "all other kernels"}.get(what, what)
    return Finding(
        S.TOO_GOOD,
        Verdict.INVALID,
        headline="the speedup is too good to be true",
        expected=f"at most {limit:.2f}x: products in FP8 earned {account.earned:.1f} ms of the reference's "
        f"{account.bf16.step:.1f} ms step",
        seen=f"at least {lowest:.2f}x{' of busy time' if on_busy else ''}; {named}: {shrunk[what]:.1f} ms less in "
        f"the FP8 arm{_flops(account)}",
        cause="the reference's host holds it up, and the FP8 arm's does not"
        if what == "idle time"
        else "the FP8 arm does less work (a smaller batch, fewer layers), or has faster kernels that are not FP8's",
        next_step="compare both arms' steps; what is not FP8 must be the same in both",
    )


def _by_extents(products: Sequence[Product]) -> dict[Extents, list[Product]]:
    groups: dict[Extents, list[Product]] = {}
    for product in products:
        groups.setdefault(product.extents, []).append(product)
    return groups
