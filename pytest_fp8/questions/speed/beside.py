"""What was seen beside timed blocks: the GPU's clocks and neighbours, and what the host did in each turn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pytest_fp8.codes import S
from pytest_fp8.gpu import CLOCKS, Conditions
from pytest_fp8.questions.speed.host import Turn
from pytest_fp8.verdicts import Finding, Verdict


@dataclass
class Beside:
    """Of the blocks that count."""

    states: list[Conditions] = field(default_factory=list)
    """The GPU's clocks and neighbours, in the order taken: once per ABBA block. Where the arms take turns, after each
    of the three turns."""
    turns: list[Turn] = field(default_factory=list)
    """In the order taken."""

    def copy(self) -> Beside:
        return Beside(list(self.states), list(self.turns))

    def clear(self) -> None:
        self.states.clear()
        self.turns.clear()

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
    def unwatched(self) -> list[str]:
        """What a driver did not tell of the GPU at some time."""
        return sorted({what for state in self.states for what in state.unknown})

    @property
    def clocks(self) -> list[int]:
        """SM clocks in MHz, in order of size."""
        return sorted({state.clock for state in self.states if CLOCKS not in state.unknown})

    def recording(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "clocks_mhz": [state.clock for state in self.states],
            "throttles": self.throttles,
            "strangers": len(self.strangers),
            "turns": [turn.numbers() for turn in self.turns],
        }


def disturbance(strangers: Sequence[int], throttles: Sequence[str], clocks: Sequence[int]) -> Finding | None:
    """Why no block can be used, or ``None``. Each as in :class:`Beside`."""
    if strangers:
        return Finding(
            S.OTHER_PROCESS,
            Verdict.INVALID,
            headline="another process used the GPU",
            expected="the GPU for this session alone",
            seen=f"process ids {list(strangers)}",
            cause="a shared GPU, or a process left by an earlier run",
            next_step="nvidia-smi, then run again",
        )
    if throttles:
        return Finding(
            S.THROTTLED,
            Verdict.INVALID,
            headline="the GPU's clocks were throttled",
            expected="no clock throttling",
            seen=", ".join(throttles) + (f"; SM clocks of {min(clocks)} to {max(clocks)} MHz" if clocks else ""),
            cause="heat, or a power supply that gives too little: neither comes of the code under test",
            next_step="nvidia-smi -q -d PERFORMANCE,TEMPERATURE, then run again on a cooler GPU",
        )
    return None
