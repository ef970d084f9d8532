"""What several GPUs work in a step, told from the kernels of simulated ranks: with late hosts as much as without, and
all of it where ranks compute in turn."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from pytest_fp8.arms.merging import merged
from pytest_fp8.worker.record.clock import MARKER, read_steps
from pytest_fp8.worker.record.trace import TraceEvent

pytestmark = pytest.mark.slow

LAYERS, LAUNCHED_AHEAD = 40, 2
LAUNCH, WIRE = 0.1, 0.8
"""Milliseconds of a launch, and of a collective that waits for nobody."""
KINDS = ("AllGather", "ReduceScatter", "AllReduce")


@dataclass
class Rank:
    """The kernels of one rank so far, and when its host and its two streams are free."""

    host: float = 0.0
    computes: float = 0.0
    sends: float = 0.0
    ends: list[float] = field(default_factory=list)
    """Of the layers' kernels."""
    events: list[TraceEvent] = field(default_factory=list)

    def ran(self, name, start, end):
        self.events.append(TraceEvent(name, True, round(start * 1e6), round(end * 1e6), 0, 0))


def trained(work, stalls, waits):
    """Ranks that train one step. ``work``: milliseconds of each layer on each rank. ``stalls``: those by which each
    host is late for it. ``waits``: whether the next layer waits for a collective, or the one after the next."""
    ranks = [Rank() for _ in work]
    ended = [0.0, 0.0]
    for rank in ranks:
        rank.ran(MARKER, 0.0, 0.0)
    for layer in range(LAYERS):
        arrived = []
        for rank, mine, late in zip(ranks, work, stalls, strict=True):
            reached = rank.ends[layer - LAUNCHED_AHEAD] if layer >= LAUNCHED_AHEAD else 0.0
            rank.host = max(rank.host, reached) + LAUNCH + late[layer]
            start = max(rank.host, rank.computes, ended[-1] if waits else ended[-2])
            rank.computes = start + mine[layer]
            rank.ran("gemm", start, rank.computes)
            rank.ends.append(rank.computes)
            arrived.append(max(rank.computes, rank.sends))
        ended.append(max(arrived) + WIRE)
        for rank, began in zip(ranks, arrived, strict=True):
            rank.ran(f"ncclDevKernel_{KINDS[layer % 3]}_RING_LL(ncclArgs)", began, ended[-1])
            rank.sends = ended[-1]
    for rank in ranks:
        rank.ran(MARKER, ended[-1], ended[-1])
    return ranks


def told(ranks):
    """Milliseconds of the step, and of it those in which the GPUs work."""
    answer = merged("busy", [read_steps(rank.events) for rank in ranks])
    return answer["step_ms"][0], answer["busy_ms"][0]


NEVER = [[0.0] * LAYERS] * 2


def alike(draw):
    each = [draw.uniform(3, 6) for _ in range(LAYERS)]
    return [[time * draw.uniform(0.99, 1.01) for time in each] for _ in range(2)]


def late(draw):
    """A fifth of the layers come to a host that is busy for 5 to 25 ms."""
    return [[draw.uniform(5, 25) if draw.random() < 0.2 else 0.0 for _ in range(LAYERS)] for _ in range(2)]


@pytest.mark.parametrize(("waits", "more"), [(True, 0.01), (False, 0.08)], ids=["waited for", "hidden"])
@pytest.mark.parametrize("seed", range(6))
def test_late_hosts_hardly_change_what_the_gpus_work(seed, waits, more):
    """Of steps that take 1.2 to 2 times as long. A collective that other kernels hide on one rank and not on the other
    keeps some of its wait."""
    draw = random.Random(seed)
    work = alike(draw)
    quiet_step, quiet = told(trained(work, NEVER, waits))
    step, works = told(trained(work, late(draw), waits))
    assert quiet == pytest.approx(quiet_step, rel=0.01), "no host is late"
    assert step > 1.15 * quiet_step
    assert -0.01 < works / quiet - 1 < more


@pytest.mark.parametrize("seed", range(6))
def test_ranks_that_compute_in_turn_work_all_the_time(seed):
    draw = random.Random(seed)
    work = [[draw.uniform(1, 9) for _ in range(LAYERS)] for _ in range(2)]
    step, works = told(trained(work, NEVER, waits=True))
    assert works == pytest.approx(step, rel=0.01), "none waits for a host"
