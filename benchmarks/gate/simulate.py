"""Runs the rules on simulated sessions of 30 cases: what each is of, how many, and what came out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import cycle, islice
from zlib import crc32

import numpy as np

from benchmarks.gate.noise import CONDITIONS, QUIET, Condition, Noise, Trace, draw
from benchmarks.gate.recordings import Floats
from benchmarks.gate.rules import TODAY, Gated, gated, ours, process_seconds, today
from pytest_fp8.stats import looks
from pytest_fp8.stats.components import Components, estimate
from pytest_fp8.stats.looks import BASELINE_BLOCKS, GATE, against_base
from pytest_fp8.verdicts import Verdict

OURS, BESIDE = "pytest-fp8", "pytest-fp8, same session"
ALONE = "pytest-fp8 compare, one case"
CHANGES = (-0.01, -0.02, -0.03, -0.05, -0.08)
SESSION = 30
"""Gated cases of a session."""
BATCH = 20
"""Sessions drawn at once."""
SHARED = 0.5
"""Share of the sessions' variance that their cases have in common, where a table does not say. The recordings give all
of it, from three pairs of sessions; false alarms of a session are most where it is none."""
BUILD_SECONDS = 25.0
"""Wall clock to build, compile and warm up a pair of arms: seen at 1B and 8B on an H200; no recording has it."""


@dataclass(frozen=True)
class Plan:
    """What is simulated, in sessions of 30 cases."""

    seed: int = 3
    healthy: int = 800
    """At no change, on a quiet machine, at each share."""
    disturbed: int = 100
    """At no change, under each other condition."""
    changed: int = 80
    """At each change."""
    tolerance: float = 0.02
    processes: int = 4
    """Processes of a stored session."""


@dataclass(frozen=True)
class Job:
    """One cell of the tables."""

    condition: Condition
    change: float
    stored: int
    """Sessions in a history."""
    shared: float
    sessions: int

    @property
    def name(self) -> str:
        return f"{self.condition.name}/{self.change}/{self.stored}/{self.shared}"


@dataclass
class Tally:
    """What one rule did in one cell."""

    rule: str
    condition: str
    change: float
    stored: int
    shared: float
    sessions: int = 0
    failed: list[int] = field(default_factory=list)
    """Of each session, how many of its cases failed."""
    cases: int = 0
    words: dict[str, int] = field(default_factory=dict)
    """Verdict -> cases."""
    gpu_seconds: float = 0.0
    builds: int = 0

    def add(self, verdicts: Sequence[Sequence[str]]) -> None:
        """``verdicts``: of each session, of each of its cases."""
        for session in verdicts:
            self.sessions += 1
            self.failed.append(session.count("FAIL"))
            self.cases += len(session)
            for word in session:
                self.words[word] = self.words.get(word, 0) + 1

    def rate(self, word: str) -> float:
        return self.words.get(word, 0) / self.cases if self.cases else 0.0

    @property
    def alarmed(self) -> int:
        """Sessions in which a case failed."""
        return sum(count > 0 for count in self.failed)

    def caught(self) -> tuple[float, float]:
        """95 % interval of the share of cases that fail. Cases of one session are alike: they count for as many as
        the spread between sessions lets one believe."""
        share, each = self.rate("FAIL"), self.cases / self.sessions
        alone = share * (1 - share) / each
        design = float(np.var(np.asarray(self.failed) / each, ddof=1)) / alone if alone and self.sessions > 1 else 1.0
        count = self.cases / max(1.0, design)
        return wilson(share * count, count)

    def to_json(self) -> dict[str, object]:
        intervals = {"alarm_interval": wilson(self.alarmed, self.sessions), "caught_interval": self.caught()}
        return {**asdict(self), "alarmed": self.alarmed, **intervals}


def jobs(plan: Plan) -> list[Job]:
    quiet = [Job(QUIET, 0.0, 4, shared, plan.healthy) for shared in (0.0, SHARED, 1.0)]
    others = [Job(condition, 0.0, 4, SHARED, plan.disturbed) for condition in CONDITIONS[1:]]
    young = [Job(QUIET, 0.0, stored, SHARED, plan.disturbed) for stored in (1, 2, 8)]
    changed = [Job(QUIET, change, 4, SHARED, plan.changed) for change in CHANGES]
    changed += [Job(QUIET, change, stored, SHARED, plan.changed) for stored in (1, 2, 8) for change in (-0.02, -0.03)]
    return [*quiet, *others, *young, *changed]


def run(noises: Iterable[Noise], components: Components, plan: Plan, workers: int = 2) -> list[Tally]:
    """Every rule in every cell, in batches of sessions; the comparison in one session at last."""
    cases = list(islice(cycle([noise for noise in noises if noise.gpu_bound]), SESSION))
    batches = [
        (cases, components, plan, job, start, min(BATCH, job.sessions - start))
        for job in jobs(plan)
        for start in range(0, job.sessions, BATCH)
    ]
    if workers == 1:
        done = [simulate(*batch) for batch in batches]
    else:
        with ProcessPoolExecutor(workers) as pool:
            done = list(pool.map(simulate, *zip(*batches, strict=True)))
    found: dict[tuple[object, ...], Tally] = {}
    for tally in (tally for tallies in done for tally in tallies):
        key = tally.rule, tally.condition, tally.change, tally.stored, tally.shared
        found[key] = together([found[key], tally]) if key in found else tally
    beside = [
        same_session(cases, plan, change, sessions, rule)
        for rule in (BESIDE, ALONE)
        for change, sessions in ((0.0, plan.healthy), (-0.01, plan.changed))
    ]
    return [*found.values(), *beside]


def simulate(
    cases: Sequence[Noise], components: Components, plan: Plan, job: Job, start: int, sessions: int
) -> list[Tally]:
    """All rules on the same traces. Each batch's stream of random numbers follows from the seed and its own name.

    The components that our rule uses are estimated from each session's own histories, as a user's are.
    """
    rng = np.random.default_rng([plan.seed, crc32(job.name.encode()), start])
    common = rng.normal(0, components.session * math.sqrt(job.shared), (sessions, job.stored + 1))
    drawn = [_draw(rng, noise, components, plan, job, common) for noise in cases]
    tallies = {
        rule: Tally(rule, job.condition.name, job.change, job.stored, job.shared)
        for rule in (OURS, *(r.name for r in TODAY))
    }
    for index in range(sessions):
        histories = [[trace.log_ratios[index].tolist() for trace in stored] for stored, _ in drawn]
        own = estimate([dict(enumerate(history)) for history in histories])
        stored_ms = [[np.median(x.bf16[index], axis=(1, 2)).tolist() for x in stored] for stored, _ in drawn]
        decide = ours(own, plan.tolerance, SESSION)
        found = [
            gated(history, now, index, milliseconds, decide)
            for history, (_, now), milliseconds in zip(histories, drawn, stored_ms, strict=True)
        ]
        tallies[OURS].add([[one.verdict.value for one in found]])
        _count(tallies[OURS], cases, found)
    for rule in TODAY:
        failed = [today(rule, stored[-1], now) for stored, now in drawn]
        tallies[rule.name].add([["FAIL" if x[i] else "PASS" for x in failed] for i in range(sessions)])
    return list(tallies.values())


def _draw(
    rng: np.random.Generator, noise: Noise, components: Components, plan: Plan, job: Job, common: Floats
) -> tuple[list[Trace], Trace]:
    """The stored sessions of one case, and the run; ``common``: (sessions, stored + 1), what all cases share."""
    effects = common + rng.normal(0, components.session * math.sqrt(1 - job.shared), common.shape)
    trials = len(common)
    stored = [
        draw(rng, noise, (trials, plan.processes, BASELINE_BLOCKS), job.condition, 0.0, True, effects[:, k])
        for k in range(job.stored)
    ]
    return stored, draw(
        rng, noise, (trials, GATE.pairs[-1], GATE.blocks), job.condition, job.change, False, effects[:, -1]
    )


def _count(tally: Tally, cases: Sequence[Noise], found: Sequence[Gated]) -> None:
    tally.builds += sum(one.builds for one in found)
    pairs = zip(cases, found, strict=True)
    tally.gpu_seconds += sum(one.builds * process_seconds(noise, one.blocks) for noise, one in pairs)


def same_session(cases: Sequence[Noise], plan: Plan, change: float, sessions: int, rule: str = BESIDE) -> Tally:
    """Base's FP8 arm against head's, at a tolerance of 1 %: no history, and no session's part. Two FP8 arms are taken
    to scatter as an FP8 and a BF16 arm do. ``rule``: whether all cases share the false alarms, or each is alone."""
    rng = np.random.default_rng([plan.seed, crc32(f"same session/{change}".encode())])
    tally = Tally(rule, QUIET.name, change, 0, 0.0)
    words: list[list[str]] = [[] for _ in range(sessions)]
    for noise in cases:
        level = math.log(noise.bf16_ms / noise.fp8_ms)
        ratios = (
            draw(rng, noise, (sessions, looks.BESIDE.pairs[-1], looks.BESIDE.blocks), QUIET, change).log_ratios - level
        )
        step = process_seconds(noise, looks.BESIDE.blocks) * 2 * noise.fp8_ms / (noise.bf16_ms + noise.fp8_ms)
        for index, pairs in enumerate(ratios.tolist()):
            for count in looks.BESIDE.pairs:
                verdict = against_base(pairs[:count], 0.01, cases=SESSION if rule == BESIDE else 1).verdict
                if verdict is not Verdict.INCONCLUSIVE:
                    break
            words[index].append(verdict.value)
            tally.builds += count
            tally.gpu_seconds += count * step
    tally.add(words)
    return tally


def together(tallies: Sequence[Tally]) -> Tally:
    """Several tallies as one."""
    first = tallies[0]
    total = Tally(first.rule, first.condition, first.change, first.stored, first.shared)
    for one in tallies:
        for name in ("sessions", "failed", "cases", "gpu_seconds", "builds"):
            setattr(total, name, getattr(total, name) + getattr(one, name))
        for word, count in one.words.items():
            total.words[word] = total.words.get(word, 0) + count
    return total


def wilson(hits: float, trials: float, z: float = 1.96) -> tuple[float, float]:
    """95 % interval of a rate (Wilson 1927); (0, 1) without trials."""
    if not trials:
        return 0.0, 1.0
    share = hits / trials
    middle = share + z * z / (2 * trials)
    half = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    return max(0.0, (middle - half) / (1 + z * z / trials)), min(1.0, (middle + half) / (1 + z * z / trials))
