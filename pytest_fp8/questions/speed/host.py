"""What stood beside an arm's blocks: clocks and neighbours, compilations, lack of memory, a late host. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

from pytest_fp8.gpu import CLOCKS, Conditions
from pytest_fp8.stats.estimate import log_ratios
from pytest_fp8.stats.quantiles import robust_sigma

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


@dataclass(frozen=True)
class Beside:
    """What was seen beside blocks."""

    states: Sequence[Conditions] = ()
    """The GPU's clocks and neighbours, in the order taken: once per ABBA block. Where the arms take turns, after each
    of the three turns."""
    turns: Sequence[Turn] = ()
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


def together(each: Iterable[Beside]) -> Beside:
    """Several as one."""
    several = list(each)
    return Beside([state for one in several for state in one.states], [turn for one in several for turn in one.turns])


def scatters(bf16: Sequence[float], fp8: Sequence[float]) -> bool:
    """Whether the blocks of a pair of processes, in milliseconds, scatter by their host. A few that were held up do not
    move it."""
    return robust_sigma(log_ratios(bf16, fp8)) > SCATTERS


def scattered(bf16: Sequence[Sequence[float]], fp8: Sequence[Sequence[float]]) -> str:
    """Both arms' blocks in words where those of a pair scatter; else empty."""
    if not any(map(scatters, bf16, fp8)):
        return ""
    blocks = {"FP8": list(chain.from_iterable(fp8)), "BF16": list(chain.from_iterable(bf16))}
    return ", ".join(f"{arm}'s blocks {min(x):.1f} to {max(x):.1f} ms a step" for arm, x in blocks.items())
