"""The rules on simulated sessions of 30 cases, and ours on the sessions that were measured.

Today's rules see what their users give them: the FP8 step times of one run of one process, held against those of one
earlier run. Ours sees both arms, several processes, and asks for more while it is undecided.

The noise model is fitted to what was measured, and traces are drawn from it. A block's log time is: the arm's own + the
session's (a part common to both arms, and a part that moves the ratio) + the process's (likewise) + the block's + what
the condition adds. The block's part is resampled: from recordings whole stretches of neighbouring ABBA blocks are taken
out of one process, all four times of each, so that autocorrelation, slow drift, tails and what the arms have in common
stay as they were. Where only the log ratios of six blocks per process are known (stored baselines), standardised
residuals of all such cases are pooled and drawn one by one, scaled to the case's own spread; each block then has the
spread of the log ratio, half the squared sum of four.

The session's and the process's parts are normal, with the spread that the plugin's own estimate of variance components
finds in the same data: a handful of processes show a spread and not a shape.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, islice
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from pytest_fp8.questions.speed.causes import unsound
from pytest_fp8.questions.speed.evidence import TimingEvidence
from pytest_fp8.questions.speed.timing import SCATTERS
from pytest_fp8.stats import looks
from pytest_fp8.stats.components import MEASURED, Components, Session, estimate
from pytest_fp8.stats.estimate import figure, level
from pytest_fp8.stats.looks import BASELINE_BLOCKS, GATE, against_base, against_history
from pytest_fp8.verdicts import Verdict

OURS, BESIDE = "pytest-fp8", "pytest-fp8, same session"
ALONE = "base beside head, one case"
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
WARM_UP_BLOCKS = 3
"""Blocks that each arm runs before its first counted one, as ``questions/speed/timing.py`` does."""
_NOTHING_SEEN = TimingEvidence(bf16=[], fp8=[])
Floats = NDArray[np.float64]


# -- noise -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """One case as it was measured once, on one machine."""

    case: str
    bf16_ms: float
    fp8_ms: float
    steps_per_block: int
    dropped_steps: int
    log_ratios: list[Floats]
    """One array per process: one log ratio per ABBA block."""
    quads: list[Floats]
    """One array per process, (blocks, 4): log milliseconds of an ABBA block in the order taken. Empty where only the
    log ratios were kept."""


SIGMA_COMMON = 0.002
"""Spread between processes of one machine that both arms share: the BF16 medians of two processes of a stored
baseline lie 0.1 to 0.3 % apart."""
HOST_COMMON, HOST_MOST = 0.02, 0.05
"""Spread and largest shift of both arms between machines of one kind: one arm took 139.3, 140.1 and 146.5 ms."""


@dataclass(frozen=True)
class Noise:
    """One case's noise. Standard deviations are of logarithms, so about fractions."""

    bf16_ms: float
    fp8_ms: float
    steps_per_block: int
    dropped_steps: int
    sigma_block: float
    """Spread of one ABBA block's log ratio within a process."""
    sigma_run: float
    """Spread of the log ratio between processes, beyond what the blocks explain."""
    residuals: Floats
    """Recorded: (processes, blocks, 4), log times less each process's and arm's median. Pooled: (values,), of unit
    spread."""

    @property
    def gpu_bound(self) -> bool:
        return self.sigma_block <= SCATTERS


@dataclass(frozen=True)
class Condition:
    """What happens around the GPU while it is measured; to the gated run unless said otherwise."""

    name: str
    common: tuple[float, float] = (0.0, 0.0)
    """Range of a slowdown of both arms alike, as a fraction."""
    drift: float = 0.0
    """Largest slowdown of both arms from the first to the last block of a process, linear in time; baseline as well."""
    outliers: float = 0.0
    """Chance that a single block of either arm takes 1.2 times as long; in the baseline as well."""
    host: bool = False
    """The run is on another machine than the baseline."""


OUTLIER = math.log(1.2)
QUIET = Condition("quiet")
CONDITIONS = (
    QUIET,
    Condition("drift", drift=0.03),
    Condition("outliers", outliers=0.04),
    Condition("common slowdown", common=(0.03, 0.10)),
    Condition("host change", host=True),
    Condition("all at once", common=(0.0, 0.10), drift=0.03, outliers=0.04, host=True),
)


@dataclass(frozen=True)
class Trace:
    """Milliseconds per step: arrays of (trials, processes, blocks, 2)."""

    bf16: Floats
    fp8: Floats

    @property
    def log_ratios(self) -> Floats:
        """(trials, processes, blocks), as ``stats.estimate.log_ratios`` makes them."""
        return (np.log(self.bf16) - np.log(self.fp8)).mean(axis=-1)


def fit(measured: dict[str, list[Measured]], components: Components) -> dict[str, Noise]:
    """Case -> its noise. Residuals of cases that were not recorded block by block are pooled."""
    spreads = {case: _sigma_block(several) for case, several in measured.items()}
    recorded = {case: [q for m in several for q in m.quads] for case, several in measured.items()}
    alone = [
        (x - x.mean()) / spreads[case]
        for case, several in measured.items()
        if not recorded[case]
        for m in several
        for x in m.log_ratios
    ]
    pooled = np.concatenate(alone or [np.zeros(1)])
    pooled = (pooled - pooled.mean()) / (pooled.std() or 1.0)
    found = {}
    for case, several in measured.items():
        quads, first = recorded[case], several[0]
        shortest = min(map(len, quads), default=0)
        found[case] = Noise(
            bf16_ms=first.bf16_ms,
            fp8_ms=first.fp8_ms,
            steps_per_block=first.steps_per_block,
            dropped_steps=first.dropped_steps,
            sigma_block=spreads[case],
            sigma_run=components.process,
            residuals=np.stack([_centred(q)[:shortest] for q in quads]) if quads else pooled,
        )
    return found


def draw(
    rng: np.random.Generator,
    noise: Noise,
    shape: tuple[int, int, int],
    condition: Condition = QUIET,
    change: float = 0.0,
    is_baseline: bool = False,
    session: Floats | None = None,
) -> Trace:
    """``shape`` = (trials, processes, blocks). ``change``: of the speedup, as a fraction; -0.03 is FP8 3 % slower.
    ``session``: what the session adds to the log ratio, for each trial; 0 by default."""
    trials, processes, blocks = shape
    quads = _blocks(rng, noise, shape)
    own = rng.normal(0, noise.sigma_run, (trials, processes, 1))
    common = rng.normal(0, SIGMA_COMMON, (trials, processes, 1))
    machine = np.zeros((trials, 1, 1))
    ratio = np.zeros(trials)[:, None, None] if session is None else session[:, None, None]
    if not is_baseline:
        machine = machine + np.log1p(rng.uniform(*condition.common, (trials, 1, 1)))
        if condition.host:
            machine = machine + np.clip(rng.normal(0, HOST_COMMON, (trials, 1, 1)), -HOST_MOST, HOST_MOST)
    if condition.drift:
        rise = rng.uniform(0, condition.drift, (trials, processes, 1, 1))
        quads = quads + rise * (np.arange(4 * blocks).reshape(blocks, 4) / (4 * blocks))
    if condition.outliers:
        quads = quads + OUTLIER * (rng.random(quads.shape) < condition.outliers)
    shared = (machine + common)[..., None]
    # The ratio's own movement is shared between the arms: neither is known to be the one that moves.
    half = ((own + ratio) / 2)[..., None]
    bf16 = math.log(noise.bf16_ms) + shared + half + quads[..., [0, 3]]
    fp8 = math.log(noise.fp8_ms) - math.log1p(change) + shared - half + quads[..., [1, 2]]
    return Trace(np.exp(bf16), np.exp(fp8))


def _blocks(rng: np.random.Generator, noise: Noise, shape: tuple[int, int, int]) -> Floats:
    trials, processes, blocks = shape
    if noise.residuals.ndim == 1:
        drawn = rng.choice(noise.residuals, (trials, processes, blocks, 4))
        return noise.sigma_block * drawn
    available, length, _ = noise.residuals.shape
    taken = np.empty((trials, processes, blocks, 4))
    source = rng.integers(available, size=(trials, processes))
    # Stretches as long as the process, or all of it, one after the other, where more is wanted than was recorded.
    for start in range(0, blocks, length):
        count = min(length, blocks - start)
        first = rng.integers(length - count + 1, size=(trials, processes))
        index = first[..., None] + np.arange(count)
        taken[:, :, start : start + count] = noise.residuals[source[..., None], index]
    return taken


def _centred(quads: Floats) -> Floats:
    """Log times less the median of their arm in this process, and a log ratio of median zero.

    An arm's times can have two modes (the first block of a turn is slower than the second, where memory was given back
    in between): its median then lies anywhere in the gap, and what the two arms' medians leave in the ratio would pass
    for a spread between processes.
    """
    middle = np.array([np.median(quads[:, [0, 3]]), np.median(quads[:, [1, 2]])])
    centred = quads - middle[[0, 1, 1, 0]]
    left_over = np.median((centred[:, 0] + centred[:, 3] - centred[:, 1] - centred[:, 2]) / 2)
    return centred - np.array([0.5, -0.5, -0.5, 0.5]) * left_over


def _sigma_block(several: Sequence[Measured]) -> float:
    """Standard deviation of one ABBA block's log ratio about its process's mean, pooled."""
    squares = sum(float(np.sum((x - x.mean()) ** 2)) for m in several for x in m.log_ratios)
    freedom = sum(len(x) - 1 for m in several for x in m.log_ratios)
    return math.sqrt(squares / freedom)


# -- the rules --------------------------------------------------------------------------------------------------------

ONE_SHOT, ONE_SHOT_RATIO, MEGATRON = "one-shot mean, 2 %", "one-shot BF16/FP8 ratio, 2 %", "Megatron-LM, median +-5 %"
TODAY = (ONE_SHOT, ONE_SHOT_RATIO, MEGATRON)


def today(rule: str, baseline: Trace, run: Trace) -> NDArray[np.bool_]:
    """One of today's rules on the first process of each: twelve blocks of FP8, or as many pairs of blocks.

    The one-shot benchmark of countless repositories fails where a mean is 2 % above the earlier mean. Megatron-LM
    (``tests/functional_tests/python_test_utils``: "iteration-time" is an ``ApproximateTest(atol=0, rtol=0.05)``) takes
    ``np.isclose`` of the medians of a steady window of steps, run against golden values: both ways.
    """

    def seen(trace: Trace) -> Floats:
        bf16, fp8 = (arm[:, 0].reshape(len(arm), -1) for arm in (trace.bf16, trace.fp8))
        return fp8 / bf16 if rule == ONE_SHOT_RATIO else fp8

    before, now = seen(baseline), seen(run)
    if rule == MEGATRON:
        return ~np.isclose(np.median(now, axis=1), np.median(before, axis=1), rtol=0.05, atol=0)
    above: NDArray[np.bool_] = now.mean(axis=1) > 1.02 * before.mean(axis=1)
    return above


Decide = Callable[[Session, Sequence[Session]], Verdict]
"""The run so far and the history, oldest session first -> the verdict."""


def ours(components: Components, tolerance: float, cases: int) -> Decide:
    """The plugin's rule."""
    return lambda run, history: (
        against_history(run, history, components=components, tolerance=tolerance, cases=cases).verdict
    )


def gated(
    history: Sequence[Session], run: Trace, trial: int, stored_ms: Session, decide: Decide
) -> tuple[Verdict, int]:
    """A rule of the plugin after the INVALID rules of the speed question, look after look; and the pairs of processes
    that it took. No floor: the question is what changed since the history. ``stored_ms``: BF16's step times in each of
    its sessions."""
    ratios = run.log_ratios[trial].tolist()
    for pairs in GATE.pairs:
        bf16 = float(np.median(run.bf16[trial, :pairs]))
        if unsound(_NOTHING_SEEN, None, bf16, stored_ms, 0.0, False) is not None:
            return Verdict.INVALID, pairs
        verdict = decide([x[: GATE.blocks] for x in ratios[:pairs]], history)
        if verdict is not Verdict.INCONCLUSIVE:
            break
    return verdict, pairs


def process_seconds(noise: Noise, blocks: int) -> float:
    """GPU seconds in steps of one pair of processes: warm-up, counted blocks, steps dropped at each turn."""
    steps, dropped = noise.steps_per_block, noise.dropped_steps
    timed = (2 * blocks + WARM_UP_BLOCKS) * steps
    bf16 = (timed + (blocks + 2) * dropped) * noise.bf16_ms
    fp8 = (timed + (blocks + 1) * dropped) * noise.fp8_ms
    return (bf16 + fp8) / 1000


def replay(histories: Mapping[str, Mapping[str, Session]], tolerance: float) -> list[tuple[str, int, float, str]]:
    """Each repeated session that was measured, held against those before it: case, sessions before, change, verdict.
    ``histories``: case -> session -> its processes, oldest session first."""
    rule, found = ours(MEASURED, tolerance, SESSION), []
    for case, sessions in histories.items():
        taken: Sequence[Session] = list(sessions.values())
        for index in range(1, len(taken)):
            run, history = taken[index], taken[:index]
            change = math.expm1(figure(run) - level(history))
            found.append((case, index, change, rule(run, history).value))
    return found


# -- the sessions -----------------------------------------------------------------------------------------------------


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

    condition: Condition = QUIET
    change: float = 0.0
    stored: int = 4
    """Sessions in a history."""
    shared: float = SHARED
    sessions: int = 0

    @property
    def name(self) -> str:
        return f"{self.condition.name}/{self.change}/{self.stored}/{self.shared}"


@dataclass
class Tally:
    """What one rule did in one cell."""

    rule: str
    job: Job
    failed: list[int] = field(default_factory=list)
    """Of each session, how many of its cases failed."""
    words: Counter[str] = field(default_factory=Counter)
    """Verdict -> cases."""
    gpu_seconds: float = 0.0
    builds: int = 0

    @property
    def cases(self) -> int:
        return self.words.total()

    def add(self, session: Sequence[str]) -> None:
        """The verdicts of one session's cases."""
        self.failed.append(session.count("FAIL"))
        self.words.update(session)

    def take(self, noise: Noise, pairs: int, blocks: int, share: float = 1.0) -> None:
        self.builds += pairs
        self.gpu_seconds += pairs * process_seconds(noise, blocks) * share

    def rate(self, word: str) -> float:
        return self.words[word] / self.cases

    def caught(self) -> tuple[float, float]:
        """95 % interval of the share of cases that fail. Cases of one session are alike: they count for as many as
        the spread between sessions lets one believe."""
        share, each = self.rate("FAIL"), self.cases / len(self.failed)
        alone = share * (1 - share) / each
        design = float(np.var(np.asarray(self.failed) / each, ddof=1)) / alone if alone else 1.0
        count = self.cases / max(1.0, design)
        return wilson(share * count, count)


def jobs(plan: Plan) -> list[Job]:
    return [
        *(Job(shared=shared, sessions=plan.healthy) for shared in (0.0, SHARED, 1.0)),
        *(Job(condition, sessions=plan.disturbed) for condition in CONDITIONS[1:]),
        *(Job(stored=stored, sessions=plan.disturbed) for stored in (1, 2, 8)),
        *(Job(change=change, sessions=plan.changed) for change in CHANGES),
        *(Job(change=x, stored=stored, sessions=plan.changed) for stored in (1, 2, 8) for x in (-0.02, -0.03)),
    ]


def run(noises: Iterable[Noise], components: Components, plan: Plan) -> list[Tally]:
    """Every rule in every cell, and the comparison in one session at last."""
    cases = list(islice(cycle([noise for noise in noises if noise.gpu_bound]), SESSION))
    with ProcessPoolExecutor(2) as pool:
        done = list(pool.map(partial(simulate, cases, components, plan), jobs(plan)))
    beside = [
        same_session(cases, plan, change, sessions, rule)
        for rule in (BESIDE, ALONE)
        for change, sessions in ((0.0, plan.healthy), (-0.01, plan.changed))
    ]
    return [*(tally for tallies in done for tally in tallies), *beside]


def simulate(cases: Sequence[Noise], components: Components, plan: Plan, job: Job) -> list[Tally]:
    """All rules on the same traces. Each batch's stream of random numbers follows from the seed and its own name.

    The components that our rule uses are estimated from each session's own histories, as a user's are.
    """
    tallies = {rule: Tally(rule, job) for rule in (OURS, *TODAY)}
    for start in range(0, job.sessions, BATCH):
        sessions = min(BATCH, job.sessions - start)
        rng = np.random.default_rng([plan.seed, crc32(job.name.encode()), start])
        common = rng.normal(0, components.session * math.sqrt(job.shared), (sessions, job.stored + 1))
        drawn = [_draw(rng, noise, components, plan, job, common) for noise in cases]
        for index in range(sessions):
            histories = [[trace.log_ratios[index].tolist() for trace in stored] for stored, _ in drawn]
            own = estimate([dict(enumerate(history)) for history in histories])
            stored_ms = [[np.median(x.bf16[index], axis=(1, 2)).tolist() for x in stored] for stored, _ in drawn]
            decide = ours(own, plan.tolerance, SESSION)
            found = [
                gated(history, now, index, milliseconds, decide)
                for history, (_, now), milliseconds in zip(histories, drawn, stored_ms, strict=True)
            ]
            tallies[OURS].add([verdict.value for verdict, _ in found])
            for noise, (_, pairs) in zip(cases, found, strict=True):
                tallies[OURS].take(noise, pairs, GATE.blocks)
        for rule in TODAY:
            failed = [today(rule, stored[-1], now) for stored, now in drawn]
            for index in range(sessions):
                tallies[rule].add(["FAIL" if x[index] else "PASS" for x in failed])
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


def same_session(cases: Sequence[Noise], plan: Plan, change: float, sessions: int, rule: str = BESIDE) -> Tally:
    """Base's FP8 arm against head's, at a tolerance of 1 %: no history, and no session's part. Two FP8 arms are taken
    to scatter as an FP8 and a BF16 arm do. ``rule``: whether all cases share the false alarms, or each is alone."""
    rng = np.random.default_rng([plan.seed, crc32(f"same session/{change}".encode())])
    tally = Tally(rule, Job(change=change))
    words: list[list[str]] = [[] for _ in range(sessions)]
    for noise in cases:
        level = math.log(noise.bf16_ms / noise.fp8_ms)
        ratios = (
            draw(rng, noise, (sessions, looks.BESIDE.pairs[-1], looks.BESIDE.blocks), QUIET, change).log_ratios - level
        )
        for index, pairs in enumerate(ratios.tolist()):
            for count in looks.BESIDE.pairs:
                verdict = against_base(pairs[:count], 0.01, cases=SESSION if rule == BESIDE else 1).verdict
                if verdict is not Verdict.INCONCLUSIVE:
                    break
            words[index].append(verdict.value)
            tally.take(noise, count, looks.BESIDE.blocks, 2 * noise.fp8_ms / (noise.bf16_ms + noise.fp8_ms))
    for session in words:
        tally.add(session)
    return tally


def wilson(hits: float, trials: float, z: float = 1.96) -> tuple[float, float]:
    """95 % interval of a rate (Wilson 1927)."""
    share = hits / trials
    middle = share + z * z / (2 * trials)
    half = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    return max(0.0, (middle - half) / (1 + z * z / trials)), min(1.0, (middle + half) / (1 + z * z / trials))
