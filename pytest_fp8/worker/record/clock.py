"""Times and memory of training steps as they run: timed blocks, busy time, peaks by phase."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from pytest_fp8.questions.layers.products import EVALUATION
from pytest_fp8.worker.record.trace import TraceEvent, busy_time, exposures, plain_events
from pytest_fp8.zoo.training import Phase

if TYPE_CHECKING:
    from pytest_fp8.worker.run.engine import Engine

T = TypeVar("T")

# -- blocks of steps --------------------------------------------------------------------------------------------------


Made = Generator[tuple[int, Phase], None, T]
"""A measurement. Each ``yield`` is one step of training, made with the batch of that number and under that phase."""


def made(steps: Made[T], engine: Engine) -> T:
    """The result of a measurement, whose steps the engine makes."""
    found: list[T] = []

    def whole() -> Made[None]:
        found.append((yield from steps))

    batches = engine.timing_batches
    with closing(whole()) as wanted:
        for index, phase in wanted:
            engine.step(batches[index % len(batches)], phase)
    return found[0]


def timed_blocks(count: int, steps: int, dropped: int) -> Made[dict[str, Any]]:
    """``milliseconds`` per step of ``count`` blocks of ``steps`` steps each, by CUDA events; and ``compilations``, how
    often torch.compile compiled code in them; ``retries``, how often the allocator found no free memory in them.

    ``dropped`` steps run before the first block and do not count: they fill the launch queue and allocate memory again.
    """
    with no_collections():
        for index in range(dropped):
            yield -1 - index, nullcontext
        compiled, retried = compiled_frames(), allocator_retries()
        milliseconds = yield from _blocks(count, steps)
        counts = {"compilations": compiled_frames() - compiled, "retries": allocator_retries() - retried}
    return {"milliseconds": milliseconds, **counts}


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


def _blocks(count: int, steps: int) -> Made[list[float]]:
    """Milliseconds per step of each block. An evaluation, a call of the model without gradients, is timed by itself and
    subtracted: one that comes every so many steps would fall into one arm's blocks and not the other's."""
    ends = [mark()]
    evaluations: list[tuple[int, Any, Any]] = []

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        began = mark() if name == EVALUATION else None
        yield
        if began is not None:
            evaluations.append((len(ends) - 1, began, mark()))

    for _ in range(count):
        for index in range(steps):
            yield index, phase
        ends.append(mark())
    times = [between(start, end) for start, end in pairwise(ends)]
    for block, start, end in evaluations:
        times[block] -= between(start, end)
    return [milliseconds / steps for milliseconds in times]


def mark() -> Any:
    """A point in the stream of the GPU's work, or in time where no GPU is used."""
    if not torch.cuda.is_initialized():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(one: Any, two: Any) -> float:
    """Milliseconds between two marks."""
    if isinstance(one, float):
        return (float(two) - one) * 1e3
    two.synchronize()
    return float(one.elapsed_time(two))


# -- the GPU's busy time ----------------------------------------------------------------------------------------------

STEPS = 5
"""Of a profile."""
Steps = dict[str, list[Any]]
"""``step_ms``, ``busy_ms``, ``compute_ms`` and ``collectives`` of each step: see :func:`read_steps`."""
NO_STEPS: Steps = {"step_ms": [], "busy_ms": [], "compute_ms": [], "collectives": []}
"""What an arm on a CPU says."""
MARKER = "spin_kernel"
"""The kernel of ``torch.cuda._sleep``, which nothing in a training step launches: it marks where each step ends."""


def busy_steps(steps: int = STEPS) -> Made[Steps]:
    """What :func:`read_steps` gives of so many steps, after one that does not count. They train the model.

    Operators are not profiled: that costs the host time in each launch, and this does so hardly. The steps follow each
    other as in training, so that the GPU has training's clocks and the launch queue is full.
    """
    with no_collections():
        yield -1, nullcontext
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            mark_step()
            for index in range(steps):
                yield index, marked_evaluation
                mark_step()
            torch.cuda.synchronize()
    return read_steps(plain_events(profiler))


@contextmanager
def marked_evaluation(name: str) -> Iterator[None]:
    """A phase. An evaluation inside the step has two marks around it, so that its kernels can be left out."""
    if name != EVALUATION:
        yield
        return
    mark_step(2)
    yield
    mark_step(2)


def mark_step(times: int = 1) -> None:
    """Say in a profile of kernels that a step ends here."""
    for _ in range(times):
        # Private: a kernel of one's own would have to be compiled.
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


# -- memory -----------------------------------------------------------------------------------------------------------


def forget_workspaces(synchronize: Callable[[], None]) -> None:
    """Give back what cuBLAS keeps for products of torch, 32 MiB on Hopper: other questions may have left it in an arm
    whose own products are all Transformer Engine's. A step takes anew what it needs.

    That the workspaces stay until this call is said in PyTorch's notes on CUDA semantics, "cuBLAS workspaces".
    """
    synchronize()
    # Private: the notes name no public way.
    torch._C._cuda_clearCublasWorkspaces()


def memory_of_step(synchronize: Callable[[], None], step: Callable[[Phase], Any]) -> dict[str, Any]:
    """Peak bytes in each phase of ``step``, and bytes resident before it. A phase may be entered several times."""
    synchronize()
    peaks: dict[str, int] = {}
    reserved = 0

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        nonlocal reserved
        torch.cuda.reset_peak_memory_stats()
        yield
        synchronize()
        peaks[name] = max(peaks.get(name, 0), torch.cuda.max_memory_allocated())
        # Evaluations are left out: the arms may evaluate at different steps, and hold more memory there.
        if name != EVALUATION:
            reserved = max(reserved, torch.cuda.max_memory_reserved())

    resident = torch.cuda.memory_allocated()
    step(phase)
    allocated = max(peak for name, peak in peaks.items() if name != EVALUATION)
    return {"resident": resident, "phases": peaks, "peak_allocated": allocated, "peak_reserved": reserved}
