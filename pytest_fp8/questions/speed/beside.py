"""What was seen beside timed blocks: the GPU's clocks and neighbours, and what happened in each turn."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from pytest_fp8.gpu import CLOCKS, Conditions
from pytest_fp8.questions.speed.host import Turn


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
