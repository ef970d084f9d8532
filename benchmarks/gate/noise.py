"""The noise model, fitted to what was measured, and the traces that are drawn from it.

A block's log time is: the arm's own + the session's (a part common to both arms, and a part that moves the ratio) + the
process's (likewise) + the block's + what the condition adds. The block's part is resampled: from recordings whole
stretches of neighbouring ABBA blocks are taken out of one process, all four times of each, so that autocorrelation,
slow drift, tails and what the arms have in common stay as they were. Where only the log ratios of six blocks per
process are known (stored baselines), standardised residuals of all such cases are pooled and drawn one by one, scaled
to the case's own spread; each block then has the spread of the log ratio, half the squared sum of four.

The session's and the process's parts are normal, with the spread that the plugin's own estimate of variance components
finds in the same data: a handful of processes show a spread and not a shape.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.gate.recordings import Floats, Measured
from pytest_fp8.questions.speed.timing import SCATTERS
from pytest_fp8.stats.components import Components

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
        """(trials, processes, blocks), as ``rules.speed.log_ratios`` makes them."""
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
