"""How long the GPU works in each of several training steps in a row, with nothing but kernels profiled."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch

from pytest_fp8.questions.layers.products import EVALUATION
from pytest_fp8.worker.answers.timing import no_collections
from pytest_fp8.worker.record.profile import plain_events
from pytest_fp8.worker.record.trace import TraceEvent, busy_time
from pytest_fp8.worker.record.wire import exposures

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_fp8.worker.run.engine import Engine

STEPS = 5
"""Of a profile."""
Steps = dict[str, list[Any]]
"""``step_ms``, ``busy_ms``, ``compute_ms`` and ``collectives`` of each step: see :func:`read_steps`."""
NO_STEPS: Steps = {"step_ms": [], "busy_ms": [], "compute_ms": [], "collectives": []}
"""What an arm on a CPU says."""
MARKER = "spin_kernel"
"""The kernel of ``torch.cuda._sleep``, which nothing in a training step launches: it marks where each step ends."""


def busy_steps(engine: Engine, steps: int = STEPS) -> Steps:
    """What :func:`read_steps` gives of so many steps, after one that does not count. They train the model.

    Operators are not profiled: that costs the host time in each launch, and this does so hardly. The steps follow each
    other as in training, so that the GPU has training's clocks and the launch queue is full.
    """
    batches = engine.timing_batches
    with no_collections():
        engine.step(batches[-1])
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            _mark()
            for index in range(steps):
                engine.step(batches[index % len(batches)], marked_evaluation)
                _mark()
            torch.cuda.synchronize()
    return read_steps(plain_events(profiler))


@contextmanager
def marked_evaluation(name: str) -> Iterator[None]:
    """A phase. An evaluation inside the step has two marks around it, so that its kernels can be left out."""
    if name != EVALUATION:
        yield
        return
    _mark(2)
    yield
    _mark(2)


def _mark(times: int = 1) -> None:
    for _ in range(times):
        torch.cuda._sleep(1)


def read_steps(events: Sequence[TraceEvent]) -> Steps:
    """Milliseconds of each step; of the time in which the GPU ran any of its kernels; of that in which it ran any but
    collectives; and of what nothing hid of each collective, with its kind, in their order.

    A mark ends a step and begins the next. Two marks with nothing between them begin or end an evaluation, whose time
    belongs to no step.
    """
    kernels = sorted((event for event in events if event.gpu), key=lambda event: event.start)
    steps: Steps = {name: [] for name in NO_STEPS}
    began: int | None = None
    wall = busy = 0
    collectives: list[list[Any]] = []
    evaluating = False
    for marks, grouped in groupby(kernels, key=lambda kernel: MARKER in kernel.name):
        group = list(grouped)
        if not marks:
            if not evaluating and began is not None:
                busy += busy_time(group)
                collectives += [[kind, alone / 1e6] for kind, alone in exposures(group)]
            continue
        if began is not None:
            wall += 0 if evaluating else group[0].start - began
            if len(group) % 2:
                steps["step_ms"].append(wall / 1e6)
                steps["busy_ms"].append(busy / 1e6)
                steps["compute_ms"].append(busy / 1e6 - sum(alone for _, alone in collectives))
                steps["collectives"].append(collectives)
                wall, busy, collectives = 0, 0, []
        evaluating ^= len(group) // 2 % 2 == 1
        began = group[-1].end
    return steps
