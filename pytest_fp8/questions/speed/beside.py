"""What was seen beside timed blocks: the GPU's clocks and neighbours, compilations, and the host's processors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pytest_fp8.gpu import Conditions
from pytest_fp8.questions.speed.host import Host


@dataclass
class Beside:
    """Of the blocks that count."""

    states: list[Conditions] = field(default_factory=list)
    """The GPU's clocks and neighbours, in the order taken: once per ABBA block. Where the arms take turns, after each
    of the three turns."""
    compilations: dict[str, int] = field(default_factory=dict)
    """Arm -> how often its code was compiled."""
    turns: list[tuple[str, Host]] = field(default_factory=list)
    """The arm whose turn it was, and what its host did meanwhile."""

    def copy(self) -> Beside:
        return Beside(list(self.states), dict(self.compilations), list(self.turns))

    def clear(self) -> None:
        for seen in (self.states, self.compilations, self.turns):
            seen.clear()

    def turn(self, arm: str, found: Mapping[str, Any]) -> None:
        """``found``: what the arm says of its blocks."""
        self.compilations[arm] = self.compilations.get(arm, 0) + found["compilations"]
        self.turns.append((arm, Host(**found["host"])))

    @property
    def host(self) -> Host:
        """Of all turns together."""
        return sum((host for _, host in self.turns), Host())

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
    def clocks(self) -> list[int]:
        """SM clocks in MHz, in order of size."""
        return sorted({state.clock for state in self.states})

    def recording(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "clocks_mhz": [state.clock for state in self.states],
            "throttles": self.throttles,
            "strangers": len(self.strangers),
            "turns": [{"arm": arm, **host.numbers()} for arm, host in self.turns],
        }
