"""How long the GPU works in each of several steps: read from kernels and the marks between the steps."""

from __future__ import annotations

import pytest

from pytest_fp8.worker.answers.busy import read_steps
from pytest_fp8.worker.watch.trace import TraceEvent

pytestmark = pytest.mark.slow
MS = 1_000_000


def kernels(*spans):
    """Kernels as (start, end) in milliseconds, collectives with a third entry; a mark is a single number."""
    events = []
    for span in spans:
        start, end, *collective = span if isinstance(span, tuple) else (span, span)
        name = "kernel" if isinstance(span, tuple) else "at::cuda::spin_kernel(long)"
        name = "ncclDevKernel_AllGather_RING_LL(ncclArgs)" if collective else name
        events.append(TraceEvent(name, True, int(start * MS), int(end * MS), 0, 0))
    return events


def test_each_step_has_its_time_and_what_of_it_the_gpu_worked():
    # Before the first mark runs the rest of the step that does not count.
    found = read_steps(kernels((0, 5), 6, (7, 10), (9, 12), 13, (13, 16), 16, (17, 18), 20))
    assert found == {"step_ms": [7, 3, 4], "busy_ms": [5, 3, 1], "compute_ms": [5, 3, 1]}


def test_a_collective_that_nothing_hides_is_no_work_of_the_gpu_s_own():
    found = read_steps(kernels(0, (0, 5), (3, 9, "nccl"), 10, (10, 14), (11, 12, "nccl"), 14))
    assert found == {"step_ms": [10, 4], "busy_ms": [9, 4], "compute_ms": [5, 4]}


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
    assert read_steps(kernels(*marks)) == {"step_ms": [5, 4], "busy_ms": [5, 4], "compute_ms": [5, 4]}


def test_without_kernels_there_is_no_step():
    assert read_steps([]) == {"step_ms": [], "busy_ms": [], "compute_ms": []}
