"""Step times of both arms with all that could have disturbed them, and how they are gathered."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

from pytest_fp8.plan import FP8, REFERENCE, Ask, Asking, TwoArms
from pytest_fp8.questions.asks import layers_of, ledgers_of
from pytest_fp8.questions.layers.evidence import LayersEvidence
from pytest_fp8.questions.ledger.evidence import ArmLedger
from pytest_fp8.questions.speed.account import Account, account_of
from pytest_fp8.questions.speed.timing import Beside, BlockTimer, Pair, scatters
from pytest_fp8.stats.looks import BASELINE_BLOCKS, GATE


@dataclass(frozen=True)
class TimingEvidence:
    """Milliseconds per step of each block in the order taken; one entry of each list per fresh process."""

    bf16: Sequence[Sequence[float]]
    fp8: Sequence[Sequence[float]]
    beside: Beside = field(default_factory=Beside)
    bf16_step: LayersEvidence | None = None
    """The arm's profiled step; ``None`` where none was."""
    fp8_step: LayersEvidence | None = None
    bf16_busy: Sequence[Sequence[float]] = ()
    """Milliseconds a step in which the GPU works, of several steps of each process that was asked: see :func:`_after`.
    Empty for one that was not."""
    fp8_busy: Sequence[Sequence[float]] = ()
    bf16_cudnn: int | None = None
    """Version of the cuDNN library that the arm's torch uses; ``None`` where it has none."""
    fp8_cudnn: int | None = None
    fp8_compiled: bool = True

    @property
    def host_bound(self) -> bool:
        """Whether the host set an arm's pace in any pair of processes: see :func:`host_bound`."""
        return any(
            host_bound(one, two, self.bf16_step, self.fp8_step) for one, two in zip(self.bf16, self.fp8, strict=True)
        )

    def account(self) -> Account | None:
        """Where both arms' steps go; ``None`` where one was not profiled."""
        bf16, fp8, *busy = (list(chain(*each)) for each in (self.bf16, self.fp8, self.bf16_busy, self.fp8_busy))
        return account_of(self.bf16_step, self.fp8_step, bf16, fp8, (busy[0], busy[1]))

    def busy_ratios(self) -> list[list[float]]:
        """Log ratios of busy time, BF16's over FP8's, of each process that was asked for it. A step in which the
        profiler saw no kernel is none."""
        found = (
            [math.log(slow) - math.log(fast) for slow, fast in zip(bf16, fp8, strict=False) if slow > 0 and fast > 0]
            for bf16, fp8 in zip(self.bf16_busy, self.fp8_busy, strict=True)
        )
        return [ratios for ratios in found if ratios]


def host_bound(
    bf16: Sequence[float], fp8: Sequence[float], bf16_step: LayersEvidence | None, fp8_step: LayersEvidence | None
) -> bool:
    """Whether the host sets an arm's pace in a pair of processes: the GPU idles for more than ``IDLE`` of a step, or
    the blocks scatter. ``bf16``, ``fp8``: milliseconds a step of each block."""
    if scatters(bf16, fp8):
        return True
    account = account_of(bf16_step, fp8_step, bf16, fp8)
    return account is not None and bool(account.launch_bound)


def timing_of(arms: TwoArms, timer: BlockTimer, look: int) -> Asking[TimingEvidence]:
    """The evidence of one look in ``GATE.pairs``."""
    return arms.kept(f"timing {look}", lambda: _measured(arms, timer, GATE.pairs[look], GATE.blocks))


def timing_for_baseline(arms: TwoArms, timer: BlockTimer, processes: int) -> Asking[TimingEvidence]:
    """``processes`` fresh pairs, with as many blocks as a baseline takes."""
    return arms.kept(f"timing update {processes}", lambda: _measured(arms, timer, processes, BASELINE_BLOCKS))


def _measured(arms: TwoArms, timer: BlockTimer, processes: int, blocks: int) -> Asking[TimingEvidence]:
    yield from timer.measure(processes, blocks, _profile, lambda pair: _after(arms, timer, pair))
    return TimingEvidence(
        bf16=timer.reference,
        fp8=timer.other,
        beside=timer.beside,
        bf16_step=(yield from layers_of(REFERENCE)),
        fp8_step=(yield from layers_of(FP8)),
        bf16_busy=[pair.busy[0] for pair in timer.pairs],
        fp8_busy=[pair.busy[1] for pair in timer.pairs],
        bf16_cudnn=arms.facts(REFERENCE)["cudnn"],
        fp8_cudnn=arms.facts(FP8)["cudnn"],
        fp8_compiled=arms.facts(FP8)["compiled"],
    )


def _profile(arm: str) -> Asking[None]:
    """What is asked of an arm after its blocks: profiling slows a process. Its answers are kept, so that they are of
    the first process alone: in a further one the ledger would be one more uncompiled step."""
    yield from layers_of(arm)
    yield Ask(arm, "ledger", ArmLedger)


def _after(arms: TwoArms, timer: BlockTimer, pair: Pair) -> Asking[None]:
    """Profiles both arms, and takes busy times of the pair from the first host-bound one on. Those of the profile are
    all there are of arms that take turns: these would have to be built again."""
    fp8, bf16 = (yield from layers_of(FP8)), (yield from layers_of(REFERENCE))
    yield from ledgers_of(arms.case.backend)
    if not (bf16.busy_ms and fp8.busy_ms):
        return
    timer.takes_busy |= host_bound(pair.reference, pair.other, bf16, fp8)
    if timer.takes_busy and not arms.takes_turns:
        pair.busy = yield from timer.take_busy()
    elif timer.takes_busy and not any(times for times, _ in (each.busy for each in timer.pairs)):
        pair.busy = bf16.busy_ms, fp8.busy_ms
