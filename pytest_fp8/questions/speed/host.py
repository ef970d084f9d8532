"""What the host did beside an arm's blocks: a turn's compilations and retries, and blocks that it held up. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any, NamedTuple

from pytest_fp8.codes import R, S
from pytest_fp8.errors import ArmError
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

    def numbers(self) -> dict[str, Any]:
        return asdict(self)


class Why(NamedTuple):
    """What a finding says of its cause."""

    code: S
    cause: str
    next_step: str


def turn_of(arm: str, steps: int, answer: Mapping[str, Any]) -> Turn:
    """``answer``: what the arm says of its blocks."""
    return Turn(arm, steps, answer["compilations"], answer["retries"])


def counted(turns: Iterable[Turn], what: str) -> dict[str, int]:
    """Arm -> the sum of this field of its turns."""
    found: dict[str, int] = {}
    for turn in turns:
        found[turn.arm] = found.get(turn.arm, 0) + getattr(turn, what)
    return found


def short_of_memory(turns: Sequence[Turn], arm: str) -> Why | None:
    """Why an arm's steps wait where the GPU has no memory left for them."""
    retries, steps = (counted(turns, what).get(arm, 0) for what in ("retries", "steps"))
    if retries < max(FEW_RETRIES, RETRIES_A_STEP * steps):
        return None
    return Why(
        S.SHORT_OF_MEMORY,
        f"too little memory for a step of {arm}'s arm: the allocator gave its cache back {retries} times in timed "
        "turns, and the GPU waits each time",
        "a smaller batch or seq in both arms, or a GPU with more memory",
    )


def crowded(arm: str, seen: str) -> ArmError:
    """The error of an arm that :func:`short_of_memory` tells of; ``seen``: its cause."""
    return ArmError(
        R.OUT_OF_MEMORY,
        f"the {arm} arm ran out of GPU memory while it was timed",
        expected="timed steps that find their memory in the allocator's cache",
        seen=seen,
        cause="the arms do not fit this GPU together: one trains beside what the other holds",
        next_step="a smaller batch or seq, or a GPU with more memory",
    )


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
