"""What travels between ranks in a profile: operation, type, bytes and time of collectives, and what nothing hides."""

from __future__ import annotations

import pytest

from pytest_fp8.questions.layers.evidence import WireTime
from pytest_fp8.worker.record.profile import PHASE, read_profile
from pytest_fp8.worker.record.trace import TraceEvent

pytestmark = pytest.mark.slow

MS = 1_000_000
BF16 = "c10::BFloat16"


def host(name, start, end, shapes=(), dtypes=(), thread=1):
    return TraceEvent(name, False, start, end, thread, 0, shapes, dtypes)


def launched(number, at, kernel, start, end, thread=1):
    """A kernel that runs from one millisecond to another, and its launch on the host."""
    launch = TraceEvent("cuLaunchKernelEx", False, at, at + 1, thread, number)
    return [launch, TraceEvent(kernel, True, start * MS, end * MS, 0, number)]


def gather(number, at, start, end):
    """As the profiler shows the gather of a weight of 64 x 32 from two ranks."""
    return [
        host(
            "c10d::_allgather_base_", at, at + 9, ([64, 32], [32, 32], [], [], []), (BF16, BF16, "", "Scalar", "Scalar")
        ),
        host("nccl:_all_gather_base", at + 1, at + 8, ([32, 32],), (BF16,)),
        *launched(number, at + 3, "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", start, end),
    ]


def test_collectives_are_told_by_operation_type_and_bytes():
    profile = read_profile(
        [
            host(PHASE + "forward", 0, 100),
            *gather(1, 10, 0, 2),
            *gather(2, 20, 2, 5),
            *launched(3, 40, "nvjet_sm90", 1, 9),
            host(PHASE + "backward", 100, 200),
            host("c10d::_reduce_scatter_base_", 110, 120, ([32, 32], [64, 32], []), ("float", "float", "")),
            *launched(4, 113, "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(args)", 8, 12),
        ]
    )
    assert profile["wire"] == [
        WireTime("all-gather", "bfloat16", 2, 2 * 2048, 2 * 4096, 5.0),
        WireTime("reduce-scatter", "float32", 1, 2048, 8192, 4.0),
    ]
    assert profile["milliseconds"]["communication"] == 9.0
    assert profile["exposed_ms"] == 4.0, "one before the product, three after it"


def test_a_list_of_tensors_is_known_by_nccls_own_range():
    """DistributedDataParallel reduces from autograd's thread."""
    [row] = read_profile(
        [
            host("c10d::allreduce_", 10, 30, ([], [], []), ("TensorList", "", "Scalar"), thread=2),
            host("nccl:all_reduce", 12, 20, ([1000],), (BF16,), thread=2),
            *launched(1, 14, "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(args)", 0, 3, thread=2),
        ]
    )["wire"]
    assert row == WireTime("all-reduce", "bfloat16", 1, 1000, 2000, 3.0)


def test_an_operator_inside_another_counts_once():
    [row] = read_profile(
        [
            host("_c10d_functional::all_gather_into_tensor", 5, 30, ([32, 32], [], []), (BF16, "Scalar", "")),
            *gather(1, 10, 0, 2),
        ]
    )["wire"]
    assert (row.count, row.bytes) == (1, 4096)


def test_a_kernel_without_its_operator_says_what_it_is():
    rows = read_profile(
        [
            *launched(1, 1, "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(args)", 0, 4),
            *launched(2, 2, "ncclDevKernel_Generic(args)", 4, 5),
        ]
    )["wire"]
    assert rows == [WireTime("reduce-scatter", "", 1, 0, 0, 4.0), WireTime("other", "", 1, 0, 0, 1.0)]


@pytest.mark.parametrize(
    ("product", "exposed"),
    [((0, 10), 0.0), ((10, 20), 10.0), ((4, 20), 4.0), ((2, 5), 7.0)],
    ids=["hidden", "after it", "its end hidden", "its middle hidden"],
)
def test_what_no_other_kernel_runs_beside_is_not_hidden(product, exposed):
    events = [*gather(1, 10, 0, 10), *launched(2, 40, "nvjet_sm90", *product)]
    assert read_profile(events)["exposed_ms"] == exposed


def test_one_gpu_has_no_wire():
    profile = read_profile(launched(1, 1, "nvjet_sm90", 0, 4))
    assert (profile["wire"], profile["exposed_ms"]) == ([], 0.0)
