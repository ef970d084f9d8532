"""Times two arms in blocks that alternate, on fresh pairs of processes, with the GPU's state beside them."""

from __future__ import annotations

import math
from typing import Any

from pytest_fp8.gpu import Conditions
from pytest_fp8.questions.arms import Arm, TwoArms

BLOCK_MS = 250.0
"""A block lasts at least this long: a pause of the host or a dip of the clocks is then a small part of it."""


class BlockTimer:
    """The times of two arms so far. ABBA: a block of the reference, two of the other arm, one of the reference."""

    def __init__(self, arms: TwoArms) -> None:
        self.arms = arms
        self.reference: list[list[float]] = []
        """Milliseconds per step of each block, in the order taken; one list per fresh process."""
        self.other: list[list[float]] = []
        self.states: list[Conditions] = []
        """The GPU's clocks and neighbours, in the order taken: once per ABBA block. Where the arms take turns, after
        each of the three turns."""

    def measure(self, processes: int, blocks: int) -> None:
        """Measure fresh pairs of processes, ``blocks`` ABBA blocks each, until there are that many pairs."""
        while len(self.other) < processes:
            if self.other:
                self.arms.renew()
            reference, other = self._in_turns(blocks) if self.arms.takes_turns else self._alternating(blocks)
            self.reference.append(reference)
            self.other.append(other)

    def _in_turns(self, blocks: int) -> tuple[list[float], list[float]]:
        """Half of the reference's blocks, all of the other arm's, the rest of the reference's."""
        first = self._run(self.arms.reference, blocks)
        self._look_around()
        other = self._run(self.arms.other, 2 * blocks)
        self._look_around()
        second = self._run(self.arms.reference, blocks)
        self._look_around()
        return [time for pair in zip(first, second, strict=True) for time in pair], other

    def _alternating(self, blocks: int) -> tuple[list[float], list[float]]:
        arms = self.arms
        # ABBA ABBA ...: neighbouring turns of one arm become one request, which saves their dropped steps.
        # Arms that both fit the GPU keep their memory between turns, so that no turn begins by growing it anew.
        for arm in (arms.other, arms.reference):
            # The first steps after other questions are not like the later ones.
            self._run(arm, 3)
        reference: list[float] = self._run(arms.reference, 1)
        other: list[float] = []
        for block in range(blocks):
            other += self._run(arms.other, 2)
            reference += self._run(arms.reference, 2 if block < blocks - 1 else 1)
            self._look_around()
        for arm in (arms.other, arms.reference):
            arm.request("park")
        return reference, other

    def _run(self, arm: Arm, count: int) -> list[float]:
        # The steps first: choosing them may build the reference, whose memory then counts.
        steps, tight = self.steps_per_block(), self.arms.tight
        times: list[float] = arm.request("blocks", count=count, steps=steps, dropped=dropped_steps(tight))
        if tight:
            arm.request("park")
        return times

    def _look_around(self) -> None:
        """Note the GPU's state; once an ABBA block at most, for the question itself lets the GPU stand idle."""
        state = self.arms.conditions()
        if state is not None:
            self.states.append(state)

    def steps_per_block(self) -> int:
        """Training steps in one block of either arm."""
        return self.arms.shared("block steps", self._choose_steps)

    def _choose_steps(self) -> int:
        one: list[float] = self.arms.reference.request("blocks", count=1, steps=3, dropped=1)
        self.arms.reference.request("park")
        return max(1, math.ceil(BLOCK_MS / (0.75 * one[0])))

    # -- what was seen beside the times ---------------------------------------------------------------------------

    @property
    def throttles(self) -> list[str]:
        """Reasons why the clocks were throttled."""
        return sorted({word for state in self.states for word in state.throttles})

    @property
    def strangers(self) -> list[int]:
        """Process ids of others that used the GPU."""
        return sorted({pid for state in self.states for pid in state.strangers})

    @property
    def clocks(self) -> list[int]:
        """SM clocks in MHz, in order of size."""
        return sorted({state.clock for state in self.states})

    def settings(self) -> dict[str, Any]:
        """How the blocks were taken: plain data."""
        return {
            "steps_per_block": self.steps_per_block(),
            "dropped_steps": dropped_steps(self.arms.tight),
            "order": "turns" if self.arms.takes_turns else "abba",
        }

    def recording(self) -> dict[str, Any]:
        """Every timed block with the GPU's state around it: plain data, to which ``benchmarks/gate`` fits its noise."""
        return {
            **self.settings(),
            "processes": [{"bf16": b, "fp8": f} for b, f in zip(self.reference, self.other, strict=True)],
            "clocks_mhz": [state.clock for state in self.states],
            "throttles": self.throttles,
            "strangers": len(self.strangers),
        }


def dropped_steps(tight: bool) -> int:
    """Steps that are run and not counted when an arm's turn begins: one more where arms give their memory back between
    turns, for it grows anew."""
    return 2 if tight else 1
