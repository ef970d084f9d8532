"""Times blocks of training steps on the GPU, without the evaluations of a hand-written step."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import torch

from pytest_fp8.questions.layers.products import EVALUATION
from pytest_fp8.worker.watch import processors
from pytest_fp8.zoo.training import Phase


def timed_blocks(
    step: Callable[[Any, Phase], object], batches: Sequence[Any], count: int, steps: int, dropped: int
) -> dict[str, Any]:
    """``milliseconds`` per step of ``count`` blocks of ``steps`` steps each, by CUDA events; and ``compilations``, how
    often torch.compile compiled code in them; ``retries``, how often the allocator found no free memory in them;
    ``ahead``, for how many seconds the GPU went on working once the last step was launched; and ``host``, what its
    processors did from the first dropped step on.

    ``dropped`` steps run before the first block and do not count: they fill the launch queue and allocate memory again.
    """
    with no_collections(), processors.watched() as host:
        for index in range(dropped):
            step(batches[-1 - index % len(batches)], nullcontext)
        compiled, retried = compiled_frames(), allocator_retries()
        milliseconds, ahead = _blocks(lambda i, phase: step(batches[i % len(batches)], phase), count, steps)
        counts = {"compilations": compiled_frames() - compiled, "retries": allocator_retries() - retried}
    return {"milliseconds": milliseconds, **counts, "ahead": ahead, "host": host()}


@contextmanager
def no_collections() -> Iterator[None]:
    """Python's garbage collector is off inside the block: its full passes come every few steps, and would count as one
    arm's time, or as one rank's for which the others wait."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:  # a user's training may run without it
            gc.enable()


def compiled_frames() -> int:
    """How many functions torch.compile has compiled in this process, each anew for every recompilation. Does not load
    the compiler."""
    compiler = sys.modules.get("torch._dynamo.utils")
    return int(compiler.counters["frames"]["total"]) if compiler is not None else 0


def allocator_retries() -> int:
    """How often CUDA had no memory left for torch's allocator, which then gave back what it had cached: each time the
    GPU waits."""
    return int(torch.cuda.memory_stats().get("num_alloc_retries", 0))


def _blocks(step: Callable[[int, Phase], object], count: int, steps: int) -> tuple[list[float], float]:
    """Milliseconds per step of each block, and the seconds that the host was ahead at the end.

    ``step`` is called with its number in the block. An evaluation, a call of the model without gradients, is timed
    by itself and subtracted: one that comes every so many steps would fall into one arm's blocks and not the other's.
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
    launched = time.monotonic()
    ends[-1].synchronize()
    ahead = time.monotonic() - launched
    times = [float(start.elapsed_time(end)) for start, end in pairwise(ends)]
    for block, start, end in evaluations:
        times[block] -= float(start.elapsed_time(end))
    return [milliseconds / steps for milliseconds in times], ahead


def _now() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
