"""Step times of both arms with all that could have disturbed them, and how they are gathered."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from statistics import median

from pytest_fp8.errors import ArmError
from pytest_fp8.plan import FP8, REFERENCE, Ask, Asking, TwoArms
from pytest_fp8.questions.asks import fp8_layers, layers_of, ledgers_of
from pytest_fp8.questions.ledger.evidence import ArmLedger
from pytest_fp8.questions.speed.account import CLOCKS, IDLE, Account, GpuStep, account_of, gpu_step, launch_bound_arms
from pytest_fp8.questions.speed.host import Turn, counted, scatters
from pytest_fp8.questions.speed.timing import BlockTimer
from pytest_fp8.stats.looks import BASELINE_BLOCKS, GATE


@dataclass(frozen=True)
class TimingEvidence:
    """Milliseconds per step of each block in the order taken; one entry of each list per fresh process."""

    bf16: Sequence[Sequence[float]]
    fp8: Sequence[Sequence[float]]
    throttles: Sequence[str] = ()
    """Reasons why the GPU's clocks were throttled."""
    strangers: Sequence[int] = ()
    """Process ids of others that used the GPU."""
    clocks: Sequence[int] = ()
    """SM clocks seen, in MHz."""
    unwatched: Sequence[str] = ()
    """What the GPU's driver did not tell of: its clocks, other processes."""
    turns: Sequence[Turn] = ()
    """What was seen in each of the arms' turns."""
    bf16_attention: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Attention operator -> kernels that it launched."""
    fp8_attention: Mapping[str, Sequence[str]] = field(default_factory=dict)
    bf16_cudnn: int | None = None
    """Version of the cuDNN library that the arm's torch uses; ``None`` where it has none."""
    fp8_cudnn: int | None = None
    fp8_compiled: bool = True
    bf16_gpu: GpuStep = field(default_factory=GpuStep)
    """The arm's profiled step; empty where none was."""
    fp8_gpu: GpuStep = field(default_factory=GpuStep)
    bf16_busy: Sequence[Sequence[float]] = ()
    """Milliseconds a step in which the GPU works, of several steps of each process that was asked: see :func:`_busy`.
    Empty for one that was not."""
    fp8_busy: Sequence[Sequence[float]] = ()
    compilations: Mapping[str, int] = field(default_factory=dict)
    """Arm -> how often its code was compiled inside timed blocks."""

    @property
    def host_bound(self) -> bool:
        """Whether the host set an arm's pace in any pair of processes: see :func:`host_bound`."""
        return any(
            host_bound(one, two, self.bf16_gpu, self.fp8_gpu) for one, two in zip(self.bf16, self.fp8, strict=True)
        )

    def account(self) -> Account | None:
        """Where both arms' steps go; ``None`` where one was not profiled.

        The few profiled steps may have met a quiet host, and the timed ones a busy one: what these waited would then
        count as the GPU's work. So busy times that were asked tell how long both arms wait, where they leave more of
        FP8's step than other clocks would. Elsewhere they could hide a reference that waits.
        """
        bf16, fp8, *busy = map(_all, (self.bf16, self.fp8, self.bf16_busy, self.fp8_busy))
        asked = [[each for each in times if each > 0] for times in busy]
        if not all(asked) or median(fp8) - median(asked[1]) <= (IDLE + CLOCKS) * median(fp8):
            asked = [[], []]
        return account_of(replace(self.bf16_gpu, asked=asked[0]), replace(self.fp8_gpu, asked=asked[1]), bf16, fp8)


def host_bound(bf16: Sequence[float], fp8: Sequence[float], bf16_gpu: GpuStep, fp8_gpu: GpuStep) -> bool:
    """Whether the host sets an arm's pace in a pair of processes: the GPU idles for more than ``IDLE`` of a step, or
    the blocks scatter. ``bf16``, ``fp8``: milliseconds a step of each block."""
    return scatters(bf16, fp8) or bool(launch_bound_arms(account_of(bf16_gpu, fp8_gpu, bf16, fp8)))


def _all(processes: Sequence[Sequence[float]]) -> list[float]:
    return list(chain.from_iterable(processes))


def timing_of(arms: TwoArms, timer: BlockTimer, look: int) -> Asking[TimingEvidence]:
    """The evidence of one look in ``GATE.pairs``."""
    return arms.kept(f"timing {look}", lambda: _measured(arms, timer, GATE.pairs[look], GATE.blocks))


NOT_ASKED: tuple[Sequence[float], Sequence[float]] = ((), ())
"""Busy times of a pair that was not asked for any."""
FURTHER = 2
"""Pairs of processes that an update measures beyond those asked for, where these spread too much to be stored."""


def timing_for_baseline(
    arms: TwoArms, timer: BlockTimer, processes: int, fit: Callable[[TimingEvidence], bool]
) -> Asking[TimingEvidence]:
    """At least ``processes`` fresh pairs, with as many blocks as a baseline takes; a few more until they are
    ``fit``."""

    def taken() -> Asking[TimingEvidence]:
        for count in range(processes, processes + FURTHER + 1):
            evidence = yield from _measured(arms, timer, count, BASELINE_BLOCKS)
            if fit(evidence):
                break
        return evidence

    # How many pairs are enough is a matter of the tolerance, in which cases with these arms may differ.
    return arms.kept(f"timing update {arms.case.tolerance}", taken)


def _measured(arms: TwoArms, timer: BlockTimer, processes: int, blocks: int) -> Asking[TimingEvidence]:
    for count in range(1, processes + 1):
        fresh = yield from timer.measure(count, blocks, _profile)
        try:
            # After the process's blocks: profiling slows a process. Its other answers are asked of the first one alone.
            fp8 = yield from fp8_layers()
            bf16 = yield from layers_of(REFERENCE)
            # In a further pair of processes it would be one more uncompiled step of each.
            yield from ledgers_of(arms.case.backend)
            busy = (yield from _busy(arms, timer, gpu_step(bf16), gpu_step(fp8))) if fresh else NOT_ASKED
        except ArmError:
            if fresh:
                timer.forget_last()
            raise
        if fresh:
            # Arms that began to take turns have all their pairs anew, and busy times of the last one alone.
            timer.busy += [NOT_ASKED] * (len(timer.other) - 1 - len(timer.busy))
            timer.busy.append(busy)
    beside = timer.beside
    return TimingEvidence(
        bf16=[list(x) for x in timer.reference],
        fp8=[list(x) for x in timer.other],
        throttles=beside.throttles,
        strangers=beside.strangers,
        clocks=beside.clocks,
        unwatched=beside.unwatched,
        turns=list(beside.turns),
        bf16_attention=bf16.attention,
        fp8_attention=fp8.attention,
        bf16_cudnn=arms.facts(REFERENCE)["cudnn"],
        fp8_cudnn=arms.facts(FP8)["cudnn"],
        fp8_compiled=arms.facts(FP8)["compiled"],
        bf16_gpu=gpu_step(bf16),
        fp8_gpu=gpu_step(fp8),
        bf16_busy=[bf16 for bf16, _ in timer.busy],
        fp8_busy=[fp8 for _, fp8 in timer.busy],
        compilations=counted(beside.turns, "compilations"),
    )


def _profile(arm: str) -> Asking[None]:
    """What is asked of an arm after its blocks."""
    yield from layers_of(arm)
    yield Ask(arm, "ledger", ArmLedger)


def _busy(
    arms: TwoArms, timer: BlockTimer, bf16: GpuStep, fp8: GpuStep
) -> Asking[tuple[Sequence[float], Sequence[float]]]:
    """Busy times of the processes that were just timed: from the first host-bound pair on. Those of the profile are all
    there are of arms that take turns: these would have to be built again."""
    if not (bf16.busy_ms and fp8.busy_ms):
        return NOT_ASKED
    timer.takes_busy |= host_bound(timer.reference[-1], timer.other[-1], bf16, fp8)
    if not timer.takes_busy:
        return NOT_ASKED
    if not arms.takes_turns:
        return (yield from timer.take_busy())
    return (bf16.busy_ms, fp8.busy_ms) if not any(times for times, _ in timer.busy) else NOT_ASKED


def busy_ratios(evidence: TimingEvidence) -> list[list[float]]:
    """Log ratios of busy time, BF16's over FP8's, of each process that was asked for it. A step in which the profiler
    saw no kernel is none."""
    pairs = zip(evidence.bf16_busy, evidence.fp8_busy, strict=True)
    found = (
        [math.log(slow) - math.log(fast) for slow, fast in zip(bf16, fp8, strict=False) if slow > 0 and fast > 0]
        for bf16, fp8 in pairs
    )
    return [ratios for ratios in found if ratios]
