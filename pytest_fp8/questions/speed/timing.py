"""Times two arms in blocks that alternate, on fresh pairs of processes, with the GPU's state beside them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from pytest_fp8.errors import ArmError
from pytest_fp8.plan import FP8, REFERENCE, Ask, Asking, TwoArms
from pytest_fp8.questions.speed.beside import Beside
from pytest_fp8.questions.speed.host import crowded, scatters, short_of_memory, turn_of
from pytest_fp8.stats.quantiles import sample_sd

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
RECENT_TURNS = 3
"""Of an arm, over which it is watched for lack of memory: of large models a block is one step, and a turn two."""

BUSY_MS, BUSY_STEPS, LONGEST_BUSY_MS = 3000.0, 30, 12000.0
"""Busy times are of 3 s of each arm's steps in a process. Where 30 steps take longer it is 30 of them, or 12 s where 30
would take more. In stored sessions one step's log ratio scatters by 1 to 5 % mostly where it takes up to 0.4 s, by 0.3
to 1.4 % from 0.7 s on. Six processes of 8B's, of 0.37 s, ten of them each, could hold 2.6 %; two of 30, 1.6 %."""
MOST_BUSY_STEPS = 25  # in a request, of two: all kernels of its steps are kept in memory

Profile = Callable[[str], Asking[object]]
Pair = tuple[list[float], list[float]]
"""Milliseconds per step of each block, of the reference and of the other arm."""


@dataclass
class Turns:
    """How long each arm's turn is; the same for all cases of one reference."""

    steps: int
    """Training steps in a block."""
    step_ms: float
    """Milliseconds of a step of the reference, roughly."""
    long: bool = False
    """Whether short turns were seen to be unsteady, so that the arms take three long ones."""


class BlockTimer:
    """The times of two arms so far. ABBA: a block of the reference, two of the other arm, one of the reference. Arms
    that settle slowly, or give their memory back between turns, take three long ones: half of the reference's blocks,
    all of the other arm's, the other half."""

    def __init__(self, arms: TwoArms, takes_busy: bool = False) -> None:
        """``takes_busy``: whether busy times are taken of every pair of processes; else from the first one on that is
        host-bound."""
        self.arms, self.takes_busy = arms, takes_busy
        self.reference: list[list[float]] = []
        """Milliseconds per step of each block, in the order taken; one list per fresh process."""
        self.other: list[list[float]] = []
        self.busy: list[tuple[Sequence[float], Sequence[float]]] = []
        """Milliseconds a step in which the GPU works, of the reference and of the other arm: one entry for each fresh
        pair of processes, empty where it was not asked."""
        self.beside = self._before_last = Beside()
        self._by_turns = arms.takes_turns
        """Whether the arms, which do not fit together, took turns in these pairs."""
        self._turns = Turns(1, 0.0)
        self._dropped, self._order = 0, "abba"
        """Steps before the last blocks that did not count, and how these were taken."""
        self._disturbed = False
        """Whether something disturbed a pair whose blocks were taken twice: there is no answer then."""
        self.on_pair: Callable[[dict[str, Any]], None] = lambda recording: None
        """Called with :meth:`recording` once a pair's blocks are there."""

    def measure(self, processes: int, blocks: int, profile: Profile | None = None) -> Asking[bool]:
        """Measure fresh pairs of processes, ``blocks`` ABBA blocks each, until there are so many. Tells if one was.
        ``profile``: asks more of an arm that takes turns, before it gives way to the other one for good."""
        fresh = False
        while len(self.other) < processes or self._began_turns:
            if self.other and not self._began_turns:
                # They may turn out not to fit together here.
                self.arms.renew()
            if self._began_turns:
                # Pairs that were timed side by side, and did not fit, are not mixed with pairs that take turns.
                self._forget()
            reference, other = yield from self._undisturbed(blocks, profile)
            self.reference.append(reference)
            self.other.append(other)
            self.on_pair(self.recording())
            fresh = True
        return fresh

    @property
    def _began_turns(self) -> bool:
        return self._by_turns is not self.arms.takes_turns

    def forget_last(self) -> None:
        """Take the last pair anew: what was to be asked of it afterwards could not be."""
        self.reference.pop()
        self.other.pop()
        self.beside = self._before_last

    def _forget(self) -> None:
        self._by_turns = self.arms.takes_turns
        self.beside.clear()
        for taken in (self.reference, self.other, self.busy):
            taken.clear()

    def _undisturbed(self, blocks: int, profile: Profile | None) -> Asking[Pair]:
        """The blocks of one pair; taken once more where something disturbed them."""
        before = self.beside.copy()
        try:
            found = yield from self._pair(blocks, profile)
            if not self._disturbed and self._disturbed_since(before):
                # A GPU that an earlier job left hot, or that another process is just leaving, may be quiet by now.
                self.beside = before.copy()
                found = yield from self._pair(blocks, profile)
                self._disturbed = self._disturbed_since(before)
        except ArmError:
            # Whoever asks again takes this pair's blocks from the start.
            self.beside = before
            raise
        self._before_last = before
        return found

    def _disturbed_since(self, before: Beside) -> bool:
        return any(state.throttles or state.strangers for state in self.beside.states[len(before.states) :])

    def _pair(self, blocks: int, profile: Profile | None) -> Asking[Pair]:
        """The blocks of one pair of processes, of the reference and of the other arm."""
        # The same for all cases of the reference.
        self._turns = yield from self.arms.kept("turns", _turns, REFERENCE)
        if self.arms.takes_turns:
            return (yield from self._in_turns(blocks, profile))
        return (yield from (self._side_by_side(blocks) if self.other else self._first_pair(blocks)))

    def _side_by_side(self, blocks: int) -> Asking[Pair]:
        """The blocks of a pair that fits the GPU together. Where both peaks fit, too, each arm keeps its memory between
        its turns, so that none begins by growing it anew."""
        found = yield from (self._in_turns(blocks) if self._long_turns() else self._alternating(blocks))
        yield Ask(FP8, "park", fresh=True)
        yield Ask(REFERENCE, "park", fresh=True)
        return found

    def _first_pair(self, blocks: int) -> Asking[Pair]:
        """The blocks of the first pair of processes. Where they show that turns must be longer, they are taken again,
        and from here on turns are."""
        first = yield from self._side_by_side(blocks)
        if self._long_turns() or not unsteady_pair(*first):
            return first
        self._turns.long = True
        # What was seen beside blocks that are taken again says nothing of those that count.
        self.beside.clear()
        return (yield from self._side_by_side(blocks))

    def _in_turns(self, blocks: int, profile: Profile | None = None) -> Asking[Pair]:
        """Half of the reference's blocks, all of the other arm's, the rest of the reference's."""
        first = yield from self._turn(REFERENCE, blocks)
        if profile is not None:
            # The process of the second half may time the next case's first half, too: nothing profiles it.
            yield from profile(REFERENCE)
        other = yield from self._turn(FP8, 2 * blocks)
        if profile is not None:
            yield from profile(FP8)
        second = yield from self._turn(REFERENCE, blocks)
        self._order = "turns"
        return [time for pair in zip(first, second, strict=True) for time in pair], other

    def _turn(self, arm: str, count: int) -> Asking[list[float]]:
        found = yield from self._run(arm, count)
        self._look_around()
        return found

    def _alternating(self, blocks: int) -> Asking[Pair]:
        # ABBA ABBA ...: neighbouring turns of one arm become one request, which saves their dropped steps.
        for arm in (FP8, REFERENCE):
            # The first steps after other questions are not like the later ones.
            yield from self._run(arm, 3, counts=False)
        reference: list[float] = yield from self._run(REFERENCE, 1)
        other: list[float] = []
        for block in range(blocks):
            other += yield from self._run(FP8, 2)
            reference += yield from self._run(REFERENCE, 2 if block < blocks - 1 else 1)
            self._look_around()
        self._order = "abba"
        return reference, other

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

    def _run(self, arm: str, count: int, counts: bool = True) -> Asking[list[float]]:
        steps, tight = self._turns.steps, self.arms.tight
        self._dropped = self._to_drop()
        found = yield Ask(arm, "blocks", fresh=True, count=count, steps=steps, dropped=self._dropped)
        if tight:
            yield Ask(arm, "park", fresh=True)
        if counts:
            turn = turn_of("BF16" if arm == REFERENCE else "FP8", count * steps, found)
            self.beside.turns.append(turn)
            recent = [each for each in self.beside.turns if each.arm == turn.arm][-RECENT_TURNS:]
            short = short_of_memory(recent, turn.arm)
            if short and not self.arms.takes_turns and not self._has_company():
                raise crowded(turn.arm, short.cause)
        times: list[float] = found["milliseconds"]
        return times

    def _has_company(self) -> bool:
        """Whether a process of others has memory of the GPU: then that is what is told."""
        self._look_around()
        return bool(self.beside.strangers)

    def _look_around(self) -> None:
        """Note the GPU's state; once an ABBA block at most, for the question itself lets the GPU stand idle."""
        if (state := self.arms.conditions()) is not None:
            self.beside.states.append(state)

    def _to_drop(self) -> int:
        """Steps that are run and not counted when a turn begins. Of a long one two at least: memory grows anew."""
        # FP8's steps are shorter than the reference's.
        return max(2, math.ceil(SETTLING_MS / (0.75 * self._turns.step_ms))) if self._long_turns() else 1

    def _long_turns(self) -> bool:
        return self.arms.tight or self._turns.long

    def recording(self) -> dict[str, Any]:
        """Every timed block with what was seen beside it: plain data, to which ``benchmarks/gate`` fits its noise."""
        return {
            "steps_per_block": self._turns.steps,
            "dropped_steps": self._dropped,
            "order": self._order,
            "processes": [{"bf16": b, "fp8": f} for b, f in zip(self.reference, self.other, strict=True)],
            **self.beside.recording(),
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
