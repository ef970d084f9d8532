"""Times two arms in blocks that alternate, on fresh pairs of processes, with what stands beside them: clocks and
neighbours, compilations, lack of memory, a late host."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from pytest_fp8.codes import R
from pytest_fp8.errors import ArmError
from pytest_fp8.gpu import CLOCKS, Conditions
from pytest_fp8.plan import FP8, REFERENCE, Ask, Asking, TwoArms
from pytest_fp8.stats.estimate import log_ratios
from pytest_fp8.stats.quantiles import robust_sigma, sample_sd

BLOCK_MS = 250.0
"""A block lasts at least this long: a pause of the host or a dip of the clocks is then a small part of it."""
UNSTEADY = 0.02
"""How far the second block of a turn may lie from its first, over all turns of an arm and beyond three standard errors.
In 30 recordings on H200s: at most 1.8 % at 1B; 2.3 to 5.8 % at 8B with Transformer Engine, where FP8 slows down in its
turn and BF16 becomes faster in its own, since the clocks follow the power that is drawn."""
SETTLING_MS = 1500.0
"""Dropped from the start of each long turn: of arms that are not steady, or that give their memory back, so that the
turn begins after a rest. In four runs on an H200 from a rest of three seconds on (60 s of each arm at 8B, 20 s at 1B,
torchao's tensorwise), the mean step of the first 1.5 s lay 0.3 to 1.1 % below the median of the last half, that of the
next 1.5 s 0.2 to 0.5 % above it. On two H100s steps of 16 of 8B's layers took about 450, 430, 445, 433 and 437 ms from
0.9 s on, in each of eight turns: four pairs could hold 2.7 %, and 1.1 % with what followed 1.8 s alone."""

BUSY_MS, BUSY_STEPS, LONGEST_BUSY_MS = 3000.0, 30, 12000.0
"""Busy times are of 3 s of each arm's steps in a process. Where 30 steps take longer it is 30 of them, or 12 s where 30
would take more. In stored sessions one step's log ratio scatters by 1 to 5 % mostly where it takes up to 0.4 s, by 0.3
to 1.4 % from 0.7 s on. Six processes of 8B's, of 0.37 s, ten of them each, could hold 2.6 %; two of 30, 1.6 %."""
MOST_BUSY_STEPS = 25  # in a request, of two: all kernels of its steps are kept in memory
NOT_ASKED: tuple[Sequence[float], Sequence[float]] = ((), ())
"""Busy times of a pair that was not asked for any."""

Profile = Callable[[str], Asking[object]]
SCATTERS = 0.015
"""Robust standard deviation of a pair's log ratios beyond which its host held blocks up: those of the GPU alone scatter
by 0.6 to 0.7 % on H200s (docs/limits.md)."""
RETRIES_A_STEP, FEW_RETRIES = 0.5, 3
"""The allocator gives its cache back so many times a step where there is no memory for it. A few times in all is
fragments, or a larger batch than those before it."""


@dataclass(frozen=True)
class Turn:
    """One request for blocks. Of several ranks, what the worst of them says."""

    arm: str
    steps: int = 0
    """Those of its blocks, which count."""
    compilations: int = 0
    """How often code was compiled in blocks that count."""
    retries: int = 0
    """How often the allocator found no free memory in blocks that count, and gave back what it had cached."""


@dataclass
class Beside:
    """What was seen beside blocks."""

    states: list[Conditions] = field(default_factory=list)
    """The GPU's clocks and neighbours, in the order taken: once per ABBA block. Where the arms take turns, after each
    of the three turns."""
    turns: list[Turn] = field(default_factory=list)
    """In the order taken."""

    @property
    def throttles(self) -> list[str]:
        """Reasons why the clocks were throttled, each with the number of readings that gave it."""
        seen = Counter(word for state in self.states for word in state.throttles)
        return [f"{word} in {count} of {len(self.states)} readings" for word, count in sorted(seen.items())]

    @property
    def strangers(self) -> list[int]:
        """Process ids of others that used the GPU."""
        return sorted({pid for state in self.states for pid in state.strangers})

    @property
    def disturbed(self) -> bool:
        return bool(self.throttles or self.strangers)

    @property
    def unwatched(self) -> list[str]:
        """What a driver did not tell of the GPU at some time."""
        return sorted({what for state in self.states for what in state.unknown})

    @property
    def clocks(self) -> list[int]:
        """SM clocks in MHz, in order of size."""
        return sorted({state.clock for state in self.states if CLOCKS not in state.unknown})

    def short_of_memory(self, arm: str) -> str:
        """How an arm's steps wait where the GPU has no memory left for them; empty where it has."""
        turns = [turn for turn in self.turns if turn.arm == arm]
        retries = sum(turn.retries for turn in turns)
        if retries < max(FEW_RETRIES, RETRIES_A_STEP * sum(turn.steps for turn in turns)):
            return ""
        return (
            f"too little memory for a step of {arm}'s arm: the allocator gave its cache back {retries} times in timed "
            "turns, and the GPU waits each time"
        )

    def recording(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "clocks_mhz": [state.clock for state in self.states],
            "throttles": self.throttles,
            "strangers": len(self.strangers),
            "turns": [asdict(turn) for turn in self.turns],
        }


def scatters(bf16: Sequence[float], fp8: Sequence[float]) -> bool:
    """Whether the blocks of a pair of processes, in milliseconds, scatter by their host. A few that were held up do not
    move it."""
    return robust_sigma(log_ratios(bf16, fp8)) > SCATTERS


@dataclass
class Turns:
    """How long each arm's turn is; the same for all cases of one reference."""

    steps: int
    """Training steps in a block."""
    step_ms: float
    """Milliseconds of a step of the reference, roughly."""
    long: bool = False
    """Whether short turns were seen to be unsteady, so that the arms take three long ones."""


@dataclass
class Pair:
    """What one fresh pair of processes showed: milliseconds per step of each block, in the order taken."""

    reference: list[float] = field(default_factory=list)
    other: list[float] = field(default_factory=list)
    beside: Beside = field(default_factory=Beside)
    busy: tuple[Sequence[float], Sequence[float]] = NOT_ASKED
    """Milliseconds a step in which the GPU works, of the reference and of the other arm."""


def beside_of(pairs: Iterable[Pair]) -> Beside:
    """What was seen beside several pairs' blocks."""
    beside = [pair.beside for pair in pairs]
    return Beside([s for each in beside for s in each.states], [t for each in beside for t in each.turns])


class BlockTimer:
    """The pairs of two arms so far. ABBA: a block of the reference, two of the other arm, one of the reference. Arms
    that settle slowly, or give their memory back between turns, take three long ones: half of the reference's blocks,
    all of the other arm's, the other half."""

    def __init__(self, arms: TwoArms, takes_busy: bool = False) -> None:
        """``takes_busy``: whether busy times are taken of every pair of processes; else from the first one on that is
        host-bound."""
        self.arms, self.takes_busy = arms, takes_busy
        self.pairs: list[Pair] = []
        """Those that count."""
        self.on_pair: Callable[[dict[str, Any]], None] = lambda recording: None
        """Called with :meth:`recording` once a pair's blocks are there."""
        self._by_turns = arms.takes_turns
        """Whether the arms, which do not fit together, took turns in these pairs."""
        self._turns = Turns(1, 0.0)
        self._dropped, self._order = 0, "abba"
        """Steps before the last blocks that did not count, and how these were taken."""
        self._disturbed = False
        """Whether something disturbed a pair whose blocks were taken twice: there is no answer then."""

    @property
    def reference(self) -> list[list[float]]:
        return [list(pair.reference) for pair in self.pairs]

    @property
    def other(self) -> list[list[float]]:
        return [list(pair.other) for pair in self.pairs]

    @property
    def beside(self) -> Beside:
        return beside_of(self.pairs)

    def measure(
        self,
        processes: int,
        blocks: int,
        profile: Profile | None = None,
        then: Callable[[Pair], Asking[None]] | None = None,
    ) -> Asking[None]:
        """Measure fresh pairs of processes, ``blocks`` ABBA blocks each, until there are so many.

        ``profile``: asks more of an arm that takes turns, before it gives way to the other one for good. ``then``: asks
        more of both once the pair's blocks are there. A pair counts only once all that was asked of it is answered.
        """
        self._note_turns()
        while len(self.pairs) < processes:
            if self.pairs:
                self.arms.renew()
                # They may turn out not to fit together here.
                self._note_turns()
            pair = yield from self._undisturbed(blocks, profile)
            self.on_pair(self.recording(pair))
            if then is not None:
                yield from then(pair)
            self.pairs.append(pair)

    def _note_turns(self) -> None:
        """Pairs that were timed side by side are not mixed with pairs that take turns."""
        if self._by_turns is not self.arms.takes_turns:
            self._by_turns = self.arms.takes_turns
            self.pairs.clear()

    def _undisturbed(self, blocks: int, profile: Profile | None) -> Asking[Pair]:
        """The blocks of one pair; taken once more where something disturbed them."""
        # The same for all cases of the reference.
        self._turns = yield from self.arms.kept("turns", _turns, REFERENCE)
        pair = yield from self._pair(blocks, profile)
        if not self.pairs and not self._long_turns() and unsteady_pair(pair.reference, pair.other):
            self._turns.long = True
            pair = yield from self._pair(blocks, profile)
        if pair.beside.disturbed and not self._disturbed:
            # A GPU that an earlier job left hot, or that another process is just leaving, may be quiet by now.
            pair = yield from self._pair(blocks, profile)
            self._disturbed = pair.beside.disturbed
        return pair

    def _pair(self, blocks: int, profile: Profile | None) -> Asking[Pair]:
        """The blocks of one pair of processes. Where both peaks fit the GPU, too, each arm keeps its memory between its
        turns, so that none begins by growing it anew."""
        pair, by_turns = Pair(), self.arms.takes_turns
        if by_turns or self._long_turns():
            yield from self._in_turns(pair, blocks, profile if by_turns else None)
        else:
            yield from self._alternating(pair, blocks)
        if by_turns:
            return pair
        for arm in (FP8, REFERENCE):
            yield Ask(arm, "park", fresh=True)
        for name in ("BF16", "FP8"):
            short = pair.beside.short_of_memory(name)
            # Where a process of others has memory of the GPU, that is what is told.
            if short and not pair.beside.strangers:
                raise ArmError(
                    R.OUT_OF_MEMORY,
                    f"the {name} arm ran out of GPU memory while it was timed",
                    expected="timed steps that find their memory in the allocator's cache",
                    seen=short,
                    cause="the arms do not fit this GPU together: one trains beside what the other holds",
                    next_step="a smaller batch or seq, or a GPU with more memory",
                )
        return pair

    def _in_turns(self, pair: Pair, blocks: int, profile: Profile | None) -> Asking[None]:
        """Half of the reference's blocks, all of the other arm's, the rest of the reference's."""
        self._order = "turns"
        first = yield from self._run(pair, REFERENCE, blocks)
        self._look_around(pair)
        if profile is not None:
            # The process of the second half may time the next case's first half, too: nothing profiles it.
            yield from profile(REFERENCE)
        pair.other += yield from self._run(pair, FP8, 2 * blocks)
        self._look_around(pair)
        if profile is not None:
            yield from profile(FP8)
        second = yield from self._run(pair, REFERENCE, blocks)
        self._look_around(pair)
        pair.reference += [time for both in zip(first, second, strict=True) for time in both]

    def _alternating(self, pair: Pair, blocks: int) -> Asking[None]:
        # ABBA ABBA ...: neighbouring turns of one arm become one request, which saves their dropped steps.
        self._order = "abba"
        for arm in (FP8, REFERENCE):
            # The first steps after other questions are not like the later ones.
            yield from self._run(Pair(), arm, 3)
        pair.reference += yield from self._run(pair, REFERENCE, 1)
        for block in range(blocks):
            pair.other += yield from self._run(pair, FP8, 2)
            pair.reference += yield from self._run(pair, REFERENCE, 2 if block < blocks - 1 else 1)
            self._look_around(pair)

    def _run(self, pair: Pair, arm: str, count: int) -> Asking[list[float]]:
        """Milliseconds a step of ``count`` blocks; what stood beside them is noted in ``pair``."""
        steps, tight = self._turns.steps, self.arms.tight
        # Of a long turn two at least: memory grows anew. FP8's steps are shorter than the reference's.
        self._dropped = max(2, math.ceil(SETTLING_MS / (0.75 * self._turns.step_ms))) if self._long_turns() else 1
        found = yield Ask(arm, "blocks", fresh=True, count=count, steps=steps, dropped=self._dropped)
        if tight:
            yield Ask(arm, "park", fresh=True)
        name = "BF16" if arm == REFERENCE else "FP8"
        pair.beside.turns.append(Turn(name, count * steps, found["compilations"], found["retries"]))
        times: list[float] = found["milliseconds"]
        return times

    def _look_around(self, pair: Pair) -> None:
        """Note the GPU's state; once an ABBA block at most, for the question itself lets the GPU stand idle."""
        if (state := self.arms.conditions()) is not None:
            pair.beside.states.append(state)

    def _long_turns(self) -> bool:
        return self.arms.tight or self._turns.long

    def take_busy(self) -> Asking[tuple[Sequence[float], Sequence[float]]]:
        """Take busy times of the live processes: twice of each arm, as blocks are, since the clocks move. No steps are
        dropped for them to settle: on H100s the log ratios of single steps then scattered by 2.1 %, not by 1.3 %."""
        step = self._turns.step_ms
        together = max(BUSY_MS, min(BUSY_STEPS * step, LONGEST_BUSY_MS)) / step
        steps = min(MOST_BUSY_STEPS, math.ceil(together / 2))
        taken: dict[str, list[float]] = {REFERENCE: [], FP8: []}
        for arm in (REFERENCE, FP8, FP8, REFERENCE):
            found = yield Ask(arm, "busy", fresh=True, steps=steps)
            taken[arm] += found["busy_ms"]
        return taken[REFERENCE], taken[FP8]

    def recording(self, *further: Pair) -> dict[str, Any]:
        """Every timed block with what was seen beside it: plain data, to which ``benchmarks/gate`` fits its noise.
        ``further``: a pair that does not count yet."""
        pairs = [*self.pairs, *further]
        return {
            "steps_per_block": self._turns.steps,
            "dropped_steps": self._dropped,
            "order": self._order,
            "processes": [{"bf16": list(pair.reference), "fp8": list(pair.other)} for pair in pairs],
            **beside_of(pairs).recording(),
        }


def _turns() -> Asking[Turns]:
    """Asked of the reference."""
    one = yield Ask(REFERENCE, "blocks", fresh=True, count=1, steps=3, dropped=1)
    yield Ask(REFERENCE, "park", fresh=True)
    step_ms = float(one["milliseconds"][0])
    return Turns(max(1, math.ceil(BLOCK_MS / (0.75 * step_ms))), step_ms)


def unsteady_pair(reference: Sequence[float], other: Sequence[float]) -> bool:
    """Whether either arm's turns are unsteady (:func:`unsteady`), and longer ones would mend it: not on a host that
    holds blocks up. The reference begins and ends with a turn of one block, which shows nothing."""
    return not scatters(reference, other) and (unsteady(reference[1:-1]) or unsteady(other))


def unsteady(times: Sequence[float]) -> bool:
    """Whether the second block of an arm's turns differs from the first. ``times``: two blocks a turn, in order."""
    drifts = [math.log(second / first) for first, second in zip(times[::2], times[1::2], strict=False)]
    if len(drifts) < 3:
        return False
    error = sample_sd(drifts) / math.sqrt(len(drifts))
    return abs(fmean(drifts)) > max(UNSTEADY, 3 * error)
