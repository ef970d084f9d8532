"""How long the GPU works in each of several steps, and what the peak of a step counts, without a GPU."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from pytest_fp8.worker.record.clock import no_collections, read_steps
from pytest_fp8.worker.record.trace import TraceEvent, busy_time, exposures
from pytest_fp8.worker.server import ArmServer

pytestmark = pytest.mark.slow


MS = 1_000_000


def kernels(*spans):
    """Kernels as (start, end) in milliseconds, collectives with their kind behind; a mark is a single number."""
    events = []
    for span in spans:
        start, end, *collective = span if isinstance(span, tuple) else (span, span)
        name = "kernel" if isinstance(span, tuple) else "at::cuda::spin_kernel(long)"
        name = f"ncclDevKernel_{collective[0]}_RING_LL(ncclArgs)" if collective else name
        events.append(TraceEvent(name, True, int(start * MS), int(end * MS), 0, 0))
    return events


def test_each_step_has_its_time_and_what_of_it_the_gpu_worked():
    # Before the first mark runs the rest of the step that does not count.
    found = read_steps(kernels((0, 5), 6, (7, 10), (9, 12), 13, (13, 16), 16, (17, 18), 20))
    times = [5, 3, 1]
    assert found == {"step_ms": [7, 3, 4], "busy_ms": times, "compute_ms": times, "collectives": [[], [], []]}


def test_of_each_collective_is_told_what_nothing_hides():
    found = read_steps(kernels(0, (0, 5), (3, 9, "AllGather"), 10, (10, 14), (11, 12, "ReduceScatter"), 14))
    each = [[["all-gather", 4]], [["reduce-scatter", 0]]]
    assert found == {"step_ms": [10, 4], "busy_ms": [9, 4], "compute_ms": [5, 4], "collectives": each}


@pytest.mark.parametrize(
    ("spans", "exposed"),
    [
        ([(2, 8, "AllReduce"), (3, 4), (5, 6), (7, 20)], [3]),
        ([(2, 8, "AllReduce"), (4, 10, "AllGather")], [6, 2]),
        ([(2, 8, "AllReduce"), (4, 6, "AllGather")], [6, 0]),
        ([(0, 9), (2, 8, "AllReduce"), (8, 12, "AllGather"), (11, 13)], [0, 2]),
        ([(0, 3), (3, 5, "AllReduce"), (5, 7)], [2]),
    ],
    ids=["between kernels", "one after the other", "within another", "partly hidden", "touching"],
)
def test_time_in_which_several_kernels_run_counts_once(spans, exposed):
    found = exposures(kernels(*spans))
    assert [ms / MS for _, ms in found] == exposed
    others = [span for span in spans if len(span) == 2]
    assert sum(ms for _, ms in found) == busy_time(kernels(*spans)) - busy_time(kernels(*others))


@pytest.mark.parametrize(
    "marks",
    [
        [0, (0, 3), 3, 3, (3, 9), 9, 9, (9, 11), 11, (11, 15), 15],
        [0, (0, 5), 5, 5, (5, 9), 9, 9, 9, (9, 13), 13],
        [0, 0, 0, (0, 8), 8, 8, (8, 13), 13, (13, 17), 17],
        [0, (0, 5), 5, 5, 5, 5, 5, (5, 9), 9],
    ],
    ids=["in the middle", "at the end", "at the start", "of no kernel"],
)
def test_an_evaluation_belongs_to_no_step(marks):
    found = read_steps(kernels(*marks))
    assert found == {"step_ms": [5, 4], "busy_ms": [5, 4], "compute_ms": [5, 4], "collectives": [[], []]}


def test_no_garbage_is_collected_while_steps_are_timed_or_profiled_and_again_afterwards():
    seen = []

    def step():
        with no_collections():
            seen.append(gc.isenabled())
            raise ValueError("a step")

    with pytest.raises(ValueError, match="a step"):
        step()
    assert [*seen, gc.isenabled()] == [False, True]


def test_a_collector_that_the_user_switched_off_stays_off():
    gc.disable()
    try:
        with no_collections():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


WEIGHTS, ACTIVATIONS, WORKSPACE = 50, 40, 32


class Gpu:
    """Counts what torch's allocator would. A cuBLAS workspace stays once a product has taken it."""

    def __init__(self, monkeypatch):
        self.allocated = self.peak = WEIGHTS
        self.workspace = 0
        for name in ("memory_allocated", "max_memory_allocated", "max_memory_reserved", "reset_peak_memory_stats"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", self.clear, raising=False)
        # What the peak is made of is the allocator's own to say.
        monkeypatch.setattr("pytest_fp8.worker.server.kinds_at_peak", lambda engine, batch, peak: {})

    def product(self):
        self.take(WORKSPACE - self.workspace)
        self.workspace = WORKSPACE

    def take(self, size):
        self.allocated += size
        self.peak = max(self.peak, self.allocated)

    def clear(self):
        self.allocated, self.workspace = self.allocated - self.workspace, 0

    def memory_allocated(self):
        return self.allocated

    def max_memory_allocated(self):
        return self.peak

    max_memory_reserved = max_memory_allocated

    def reset_peak_memory_stats(self):
        self.peak = self.allocated


def server(gpu, training_takes_products):
    @contextmanager
    def no_phase(name):
        yield

    def step(batch, phase=no_phase):
        with phase("forward"):
            if training_takes_products:
                gpu.product()
            gpu.take(ACTIVATIONS)
        gpu.take(-ACTIVATIONS)

    made = ArmServer.__new__(ArmServer)
    made.engine = SimpleNamespace(timing_batches=[1, 2], park=lambda: None, synchronize=lambda: None, step=step)
    return made


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("asked_before", [False, True])
def test_the_peak_is_that_of_the_step_whatever_was_asked_before(monkeypatch, own, asked_before):
    """An arm whose products are all Transformer Engine's takes none of cuBLAS's workspaces through torch; the products
    that its numerics are held against do."""
    gpu = Gpu(monkeypatch)
    if asked_before:
        gpu.product()
    found = server(gpu, own).memory()
    assert found["peak_allocated"] == WEIGHTS + ACTIVATIONS + own * WORKSPACE
    assert found["resident"] == WEIGHTS + own * WORKSPACE
