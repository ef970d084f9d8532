"""What the host did in each turn of an arm that was timed, and whether the blocks scatter by it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from statistics import median
from typing import Any, NamedTuple

from pytest_fp8.codes import R, S
from pytest_fp8.errors import ArmError
from pytest_fp8.rules.speed import log_ratios
from pytest_fp8.rules.statistics import robust_sigma

SCATTERED = 0.08
"""A :func:`scatter` beyond this is a busy host's. On H200s 0.01 to 0.06, and 0.14 to 0.52 for Transformer Engine's arms
on a busy host."""
SCATTERS = 0.015
"""Beyond this robust standard deviation of a process's log ratios of blocks its host held them up: those of the GPU
alone scatter by 0.6 to 0.7 %. Of 217 stored processes of cases that are gated on step time 12 lie above it: adapters, a
small vision transformer, and what launches layer by layer."""
RETRIES_A_STEP, FEW_RETRIES = 0.5, 3
"""The allocator gives its cache back so many times a step where there is no memory for it. A few times in all is
fragments, or a larger batch than those before it."""
TOLD = 0.01
"""A share of processor time below this is not worth a word: a quiet machine's clock ticks and housekeeping."""


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
    ahead: float = 0.0
    """Seconds by which the host was ahead of the GPU: from its last launch until the GPU was done."""
    wall: float = 0.0
    """Seconds that the turn took, with the steps before its blocks."""
    used: float = 0.0
    """Seconds as in :class:`pytest_fp8.worker.record.clock.HostReading`; so are those below."""
    stolen: float = 0.0
    waited: float = 0.0

    def numbers(self) -> dict[str, Any]:
        return asdict(self)


class Why(NamedTuple):
    """What a finding says of its cause."""

    code: S
    cause: str
    next_step: str


TIMES = "stolen", "used", "waited", "wall"


def turn_of(arm: str, steps: int, answer: Mapping[str, Any]) -> Turn:
    """``answer``: what the arm says of its blocks."""
    return Turn(arm, steps, answer["compilations"], answer["retries"], answer["ahead"], **answer["host"])


def counted(turns: Iterable[Turn], what: str) -> dict[str, int]:
    """Arm -> the sum of this field of its turns."""
    found: dict[str, int] = {}
    for turn in turns:
        found[turn.arm] = found.get(turn.arm, 0) + getattr(turn, what)
    return found


class Scattered(NamedTuple):
    """An arm whose blocks scatter as on a busy host; empty where neither does."""

    arm: str = ""
    blocks: str = ""
    """The blocks of both arms, in words."""
    host: str = ""
    """What is known of the host in this arm's turns."""

    @property
    def told(self) -> str:
        return "; ".join(filter(None, (self.blocks, self.host)))


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


def scattered(bf16: Sequence[Sequence[float]], fp8: Sequence[Sequence[float]], turns: Sequence[Turn]) -> Scattered:
    """``bf16``, ``fp8``: milliseconds of each block of each process."""
    blocks = {"FP8": list(chain.from_iterable(fp8)), "BF16": list(chain.from_iterable(bf16))}
    arm = max(blocks, key=lambda name: scatter(blocks[name]))
    if scatter(blocks[arm]) <= SCATTERED:
        return Scattered()
    ranges = ", ".join(f"{each}'s blocks {min(x):.1f} to {max(x):.1f} ms a step" for each, x in blocks.items())
    return Scattered(arm, ranges, _host_of([turn for turn in turns if turn.arm == arm]))


def scatter(times: Sequence[float]) -> float:
    """Share of the median between the tenth and the ninetieth of a hundred blocks: a single pause is not in it."""
    import numpy as np

    return float(np.subtract(*np.percentile(times, (90, 10))) / np.median(times))


def scatters(bf16: Sequence[float], fp8: Sequence[float]) -> bool:
    """Whether the blocks of a pair of processes, in milliseconds, scatter by their host, and their median with them. A
    few that were held up do not move it."""
    return robust_sigma(log_ratios(bf16, fp8)) > SCATTERS


def _host_of(turns: Sequence[Turn]) -> str:
    if not turns:
        return ""
    ahead = 1000 * median(turn.ahead for turn in turns)
    told = [f"its host was {ahead:.0f} ms ahead of the GPU when a turn ended (median of {len(turns)})"]
    stolen, used, waited, wall = (sum(getattr(turn, what) for turn in turns) for what in TIMES)
    if stolen > TOLD * (used + stolen):
        told.append(f"{stolen / (used + stolen):.0%} of the processor time asked for went to other virtual machines")
    if waited > TOLD * wall:
        told.append(f"its threads, added up, waited {waited / wall:.2f} s in each second for a processor")
    return "; ".join(told)
