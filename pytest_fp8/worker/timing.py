"""Times blocks of training steps on the GPU, without what a hand-written step evaluates in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch

from pytest_fp8.questions.layers.products import EVALUATION
from pytest_fp8.zoo.training import Phase


def timed_blocks(step: Callable[[int, Phase], object], count: int, steps: int) -> list[float]:
    """Milliseconds per step of ``count`` blocks of ``steps`` steps each, by CUDA events; ``step`` gets its number in
    the block.

    Its evaluation, a call of the model without gradients, is timed by itself and left out: coming every so many steps,
    it would fall into one arm's blocks and not into the other's.
    """
    ends = [_now()]
    evaluations: list[tuple[int, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        began = _now() if name == EVALUATION else None
        yield
        if began is not None:
            evaluations.append((len(ends) - 1, began, _now()))

    for _ in range(count):
        for index in range(steps):
            step(index, phase)
        ends.append(_now())
    ends[-1].synchronize()
    times = [float(start.elapsed_time(end)) for start, end in pairwise(ends)]
    for block, start, end in evaluations:
        times[block] -= float(start.elapsed_time(end))
    return [milliseconds / steps for milliseconds in times]


def _now() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
