"""Noise and recordings as the gate's benchmark has them, and what its rules say of sessions that are drawn from it."""

from __future__ import annotations

import numpy as np

from benchmarks.gate.noise import draw, fit
from benchmarks.gate.recordings import from_recording
from benchmarks.gate.simulate import gated
from pytest_fp8.stats.components import MEASURED

BLOCKS = 24


def recording(block=0.004, run=0.003, processes=4, seed=0, **changes):
    """A recording as ``record.py`` writes one; its noise is what the arguments say."""
    rng = np.random.default_rng(seed)
    entries = []
    for _ in range(processes):
        shift = rng.normal(0, run)
        bf16, fp8 = (
            [float(x) for x in base * np.exp(sign * shift / 2 + rng.normal(0, block, 2 * BLOCKS))]
            for base, sign in ((120.0, 1), (107.0, -1))
        )
        entries.append({"bf16": bf16, "fp8": fp8, "throttles": [], "strangers": 0})
    return {"case": "1b-x", "steps_per_block": 3, "dropped_steps": 1, "processes": entries, **changes}


def noise_put_in():
    """What is fitted to twelve such processes."""
    return fit({"1b-x": [from_recording(recording(processes=12))]}, MEASURED)["1b-x"]


def histories_of(rng, noise, count, sessions=4, **how):
    traces = [draw(rng, noise, (count, 4, 8), is_baseline=True) for _ in range(sessions)]
    return traces, draw(rng, noise, (count, 4, 6), **how)


def verdicts(traces, now, decide):
    found = []
    for index in range(len(now.bf16)):
        history = [trace.log_ratios[index].tolist() for trace in traces]
        stored = [[float(np.median(trace.bf16[index]))] for trace in traces]
        found.append(gated(history, now, index, stored, decide))
    return found
