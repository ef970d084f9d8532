"""Runs the rules on traces: which cases, conditions and changes, how many trials of each, and what came out."""

from __future__ import annotations

import math
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from zlib import crc32

import numpy as np

from benchmarks.gate.noise import CONDITIONS, QUIET, Condition, Noise, draw
from benchmarks.gate.rules import TODAY, Outcome, ours, today
from pytest_fp8.rules.speed import BASELINE_BLOCKS, GATED_CASES, LOOKS

OURS = "pytest-fp8"
CHANGES = (-0.01, -0.02, -0.03, -0.05, -0.08)
SESSION = 30
"""Gated cases of a session."""
BATCH = 2500


@dataclass(frozen=True)
class Plan:
    """What is simulated."""

    seed: int = 3
    healthy: int = 20_000
    """Trials at no change, per case and condition: a rate of 1 % per session is 1 in 3000 of them."""
    changed: int = 4_000
    """Trials per case and change."""
    tolerance: float = 0.02
    processes: int = 4
    """Processes of a baseline."""


@dataclass
class Tally:
    """What one rule did in one case, under one condition, at one change of the speedup."""

    rule: str
    case: str
    condition: str
    change: float
    trials: int = 0
    failed: int = 0
    gated: int = 0
    """Trials less those whose baseline was refused."""
    gpu_seconds: float = 0.0
    builds: float = 0.0
    most_gpu_seconds: float = 0.0
    other: dict[str, int] = field(default_factory=dict)

    def add(self, outcome: Outcome) -> None:
        self.trials += len(outcome.failed)
        self.failed += int(outcome.failed.sum())
        self.gated += len(outcome.failed) - outcome.other.get("refused", 0)
        self.gpu_seconds += float(outcome.gpu_seconds.sum())
        self.builds += float(outcome.builds.sum())
        self.most_gpu_seconds = max(self.most_gpu_seconds, float(outcome.gpu_seconds.max()))
        for word, count in outcome.other.items():
            self.other[word] = self.other.get(word, 0) + count

    def to_json(self) -> dict[str, object]:
        low, high = wilson(self.failed, self.gated)
        return {**asdict(self), "rate": self.rate, "interval": [low, high]}

    @property
    def rate(self) -> float:
        """Share of gated trials that failed."""
        return self.each(self.failed)

    def each(self, total: float) -> float:
        """A total per gated trial; 0 where every baseline was refused."""
        return total / self.gated if self.gated else 0.0


def run(noises: Iterable[Noise], plan: Plan, workers: int = 2) -> list[Tally]:
    """Every rule on every case: all conditions at no change, all changes on a quiet machine."""
    jobs = []
    for noise in noises:
        jobs += [(noise, condition, 0.0, plan, plan.healthy) for condition in CONDITIONS]
        jobs += [(noise, QUIET, change, plan, plan.changed) for change in CHANGES]
    jobs.sort(key=lambda job: -job[4])
    if workers == 1:
        done = [simulate(*job) for job in jobs]
    else:
        with ProcessPoolExecutor(workers) as pool:
            done = list(pool.map(simulate, *zip(*jobs, strict=True)))
    return [tally for tallies in done for tally in tallies]


def simulate(noise: Noise, condition: Condition, change: float, plan: Plan, trials: int) -> list[Tally]:
    """All rules on the same traces. Each job's stream of random numbers follows from the seed and its own name."""
    name = f"{noise.case}/{condition.name}/{change}"
    rng = np.random.default_rng([plan.seed, crc32(name.encode())])
    tallies = {rule: Tally(rule, noise.case, condition.name, change) for rule in [OURS, *(r.name for r in TODAY)]}
    for start in range(0, trials, BATCH):
        count = min(BATCH, trials - start)
        before = draw(rng, noise, (count, plan.processes, BASELINE_BLOCKS), condition, is_baseline=True)
        now = draw(rng, noise, (count, LOOKS[-1][0], LOOKS[-1][1]), condition, change)
        tallies[OURS].add(ours(before, now, noise, plan.tolerance, GATED_CASES))
        for rule in TODAY:
            tallies[rule.name].add(today(rule, before, now, noise))
    return list(tallies.values())


def wilson(hits: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """95 % interval of a rate (Wilson 1927); (0, 1) without trials."""
    if not trials:
        return 0.0, 1.0
    share = hits / trials
    middle = share + z * z / (2 * trials)
    half = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    return max(0.0, (middle - half) / (1 + z * z / trials)), min(1.0, (middle + half) / (1 + z * z / trials))


def per_session(rate: float, cases: int = SESSION) -> float:
    """Chance that at least one of so many independent cases fails."""
    return 1 - (1 - rate) ** cases


def together(tallies: Iterable[Tally]) -> Tally:
    """Several tallies as one: the average case."""
    chosen = list(tallies)
    total = Tally(chosen[0].rule, "all", chosen[0].condition, chosen[0].change)
    for one in chosen:
        for name in ("trials", "failed", "gated", "gpu_seconds", "builds"):
            setattr(total, name, getattr(total, name) + getattr(one, name))
        total.most_gpu_seconds = max(total.most_gpu_seconds, one.most_gpu_seconds)
        for word, count in one.other.items():
            total.other[word] = total.other.get(word, 0) + count
    return total
