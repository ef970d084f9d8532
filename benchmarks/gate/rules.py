"""The rules that are compared: ours, and those that people use today.

Today's rules see what their users give them: the FP8 step times of one run of one process, held against those of one
earlier run. Ours sees both arms, several processes, and asks for more while it is undecided.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.gate.noise import Noise, Trace
from benchmarks.gate.recordings import Floats
from pytest_fp8.questions.speed.causes import unsound
from pytest_fp8.questions.speed.evidence import TimingEvidence
from pytest_fp8.stats.components import Components, Session
from pytest_fp8.stats.looks import GATE, against_history
from pytest_fp8.verdicts import Verdict

WARM_UP_BLOCKS = 3
"""Blocks that each arm runs before its first counted one, as ``questions/speed/timing.py`` does."""
Booleans = NDArray[np.bool_]


Decide = Callable[[Session, Sequence[Session]], Verdict]
"""The run so far and the history, oldest session first -> the verdict."""


@dataclass(frozen=True)
class Gated:
    """What a rule of the plugin said in the end, how many pairs of processes it took, and how many blocks of each."""

    verdict: Verdict
    builds: int
    blocks: int


@dataclass(frozen=True)
class Rule:
    """A rule of today: ``fails(baseline, run)`` on arrays of (trials, values), of the quantity it looks at."""

    name: str
    fails: Callable[[Floats, Floats], Booleans]
    looks_at: str = "fp8"
    """``fp8`` milliseconds, or the ``ratio`` of BF16's to FP8's."""


def gated(history: Sequence[Session], run: Trace, trial: int, stored_ms: Session, decide: Decide) -> Gated:
    """A rule of the plugin after the INVALID rules of the speed question, look after look. No floor: the question is
    what changed since the history. ``stored_ms``: BF16's step times in each of its sessions."""
    ratios = run.log_ratios[trial].tolist()
    blocks = GATE.blocks
    for processes in GATE.pairs:
        bf16 = float(np.median(run.bf16[trial, :processes]))
        if unsound(_NOTHING_SEEN, None, bf16, stored_ms, 0.0, False) is not None:
            return Gated(Verdict.INVALID, processes, blocks)
        verdict = decide([x[:blocks] for x in ratios[:processes]], history)
        if verdict is not Verdict.INCONCLUSIVE:
            break
    return Gated(verdict, processes, blocks)


def ours(components: Components, tolerance: float, cases: int) -> Decide:
    """The plugin's rule."""

    def decide(run: Session, history: Sequence[Session]) -> Verdict:
        return against_history(run, history, components=components, tolerance=tolerance, cases=cases).verdict

    return decide


_NOTHING_SEEN = TimingEvidence(bf16=[], fp8=[])


def process_seconds(noise: Noise, blocks: int) -> float:
    """GPU seconds in steps of one pair of processes: warm-up, counted blocks, steps dropped at each turn."""
    steps, dropped = noise.steps_per_block, noise.dropped_steps
    timed = (2 * blocks + WARM_UP_BLOCKS) * steps
    bf16 = (timed + (blocks + 2) * dropped) * noise.bf16_ms
    fp8 = (timed + (blocks + 1) * dropped) * noise.fp8_ms
    return (bf16 + fp8) / 1000


def today(rule: Rule, baseline: Trace, run: Trace) -> Booleans:
    """One of today's rules on the first process of each: twelve blocks of FP8, or as many pairs of blocks."""
    return rule.fails(_seen(rule, baseline), _seen(rule, run))


def _seen(rule: Rule, trace: Trace) -> Floats:
    fp8 = trace.fp8[:, 0].reshape(len(trace.fp8), -1)
    if rule.looks_at == "fp8":
        return fp8
    return fp8 / trace.bf16[:, 0].reshape(len(trace.bf16), -1)


def mean_above(share: float) -> Callable[[Floats, Floats], Booleans]:
    """The mean is more than ``share`` above the earlier mean: the one-shot benchmark of countless repositories."""
    return lambda before, now: now.mean(axis=1) > (1 + share) * before.mean(axis=1)


def median_apart(share: float) -> Callable[[Floats, Floats], Booleans]:
    """Megatron-LM, ``tests/functional_tests/python_test_utils``: "iteration-time" is an ``ApproximateTest(atol=0,
    rtol=0.05)``, ``np.isclose`` of the medians of a steady window of steps, run against golden values: both ways."""
    return lambda before, now: ~np.isclose(np.median(now, axis=1), np.median(before, axis=1), rtol=share, atol=0)


TODAY = (
    Rule("one-shot mean, 2 %", mean_above(0.02)),
    Rule("one-shot BF16/FP8 ratio, 2 %", mean_above(0.02), looks_at="ratio"),
    Rule("Megatron-LM, median +-5 %", median_apart(0.05)),
)
