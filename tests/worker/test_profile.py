"""What a GPU did in a step, read without one: products with their kernels, where time went, what travels between ranks,
how long the GPU worked, and what was in memory at the peak."""

from __future__ import annotations

import gc
import gzip
import json
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from pytest_fp8.questions.layers.evidence import WireTime
from pytest_fp8.questions.layers.products import EVALUATION, FP8, LayerCall, Product, profiled_step, role_table
from pytest_fp8.questions.memory import ACTIVATIONS, COPIES, GRADIENTS, OPTIMIZER, OTHER, WEIGHTS
from pytest_fp8.recipes import ROLES
from pytest_fp8.worker.record import allocations
from pytest_fp8.worker.record.allocations import Label, StepLabels, at_peak, summed_to
from pytest_fp8.worker.record.clock import no_collections, read_steps
from pytest_fp8.worker.record.libraries import TE_RANGE, te_product, watch_transformer_engine
from pytest_fp8.worker.record.profile import PHASE, kernel_times, read_profile
from pytest_fp8.worker.record.trace import TraceEvent, busy_time, exposures
from pytest_fp8.zoo.shapes import SHAPES

pytestmark = pytest.mark.slow

BF16, E4M3 = "c10::BFloat16", "c10::Float8_e4m3fn"
MS = 1_000_000


def host(name, start, end, shapes=(), dtypes=(), thread=1):
    return TraceEvent(name, False, start, end, thread, 0, shapes, dtypes)


def product(name, start, end, left, right, dtype):
    return host(name, start, end, (left, right), (dtype, dtype))


def kernel(start, end, name="kernel", number=0):
    """A kernel that ran from one millisecond to another."""
    return TraceEvent(name, True, start * MS, end * MS, 0, number)


def launched(number, at, name, start, end, thread=1):
    """A kernel, and its launch on the host."""
    return [TraceEvent("cuLaunchKernelEx", False, at, at + 1, thread, number), kernel(start, end, name, number)]


def test_a_profile_is_read_by_where_kernels_were_launched():
    events = [
        host(PHASE + "forward", 0, 100),
        product("aten::linear", 5, 40, [32, 64], [128, 64], BF16),
        product("aten::mm", 10, 30, [32, 64], [64, 128], BF16),
        *launched(1, 15, "nvjet_sm90_tst_1x1", 500, 520),
        *launched(2, 17, "splitKreduce", 520, 522),
        host(PHASE + "backward", 100, 200),
        product("aten::_scaled_mm", 110, 130, [32, 128], [128, 64], E4M3),
        *launched(3, 115, "nvjet_sm90_qqtst_1x1", 530, 540),
        host(TE_RANGE + "NT|32x64|32x128|fp8", 140, 160),
        *launched(4, 145, "nvjet_sm90_qrtst_1x1", 550, 560),
        host("aten::_scaled_dot_product_cudnn_attention", 170, 180),
        *launched(5, 172, "cudnn_sdpa_knob_3", 570, 580),
    ]
    profile = read_profile(events)
    assert [(p.phase, p.inner, p.outer, p.kind, p.kernel) for p in profile["products"]] == [
        ("forward", 64, (32, 128), "bfloat16", "nvjet_sm90_tst_1x1"),
        ("backward", 128, (32, 64), FP8, "nvjet_sm90_qqtst_1x1"),
        ("backward", 32, (128, 64), FP8, "nvjet_sm90_qrtst_1x1"),
    ]
    assert profile["attention"] == {"_scaled_dot_product_cudnn_attention": ["cudnn_sdpa"]}


def test_the_time_that_is_neither_product_nor_attention_is_told_by_kernel():
    copy = "void at::native::CopyBatched<unsigned char, 2>(at::native::Sizes<2>, int)"
    events = [
        host(PHASE + "forward", 0, 100),
        product("aten::mm", 10, 30, [32, 64], [64, 128], BF16),
        *launched(1, 15, "nvjet_sm90_tst_1x1", 0, 1),
        kernel(1, 3, copy, 2),
        kernel(4, 6, copy, 3),
        kernel(10, 15, "triton_red_fused_abs_max_12", 4),
        kernel(0, 30, "ncclDevKernel_AllGather_RING_LL(ncclArgs)", 5),
    ]
    profile = read_profile(events)
    assert [(k.name, k.count, k.milliseconds) for k in profile["rest"]] == [
        ("triton_red_fused_abs_max", 1, 5.0),
        ("CopyBatched<unsigned char, 2>", 2, 4.0),
    ]
    assert profile["milliseconds"]["rest"] == 9.0


@pytest.mark.parametrize("inner", ["aten::_scaled_mm", "aten::_scaled_mm_v2"])
def test_an_uncompiled_product_of_torchao_is_the_scaled_one_inside_it(inner):
    # As the profiler shows torchao 0.18 without torch.compile: its tensors say bfloat16, what they hold is FP8.
    events = [
        host(PHASE + "forward", 0, 100),
        product("aten::mm", 10, 50, [32, 64], [64, 128], BF16),
        product(inner, 20, 40, [32, 64], [64, 128], E4M3),
        *launched(1, 25, "nvjet_sm90_qqtst_1x1", 500, 520),
        product("aten::mm", 60, 80, [32, 128], [128, 16], BF16),
        *launched(2, 65, "nvjet_sm90_tst_1x1", 530, 540),
    ]
    assert [(p.inner, p.kind, p.kernel) for p in read_profile(events)["products"]] == [
        (64, FP8, "nvjet_sm90_qqtst_1x1"),
        (128, "bfloat16", "nvjet_sm90_tst_1x1"),
    ]


# -- where time went -------------------------------------------------------------------------------------------------


def test_the_rest_is_what_runs_beside_no_product():
    """As under FSDP2, which casts on a gather's stream what is gathered."""
    multiplies, beside, partly, alone = kernel(0, 5), kernel(1, 3), kernel(4, 6), kernel(20, 23)
    kernels = [multiplies, beside, partly, alone, kernel(2, 30, "ncclDevKernel_AllGather_RING_LL(ncclArgs)")]
    found = kernel_times({"fp8 products": 5 * MS}, kernels, rest=[beside, partly, alone])
    assert found == {"fp8 products": 5, "rest": 1 + 3, "busy": 30}


def test_what_is_evaluated_in_the_step_is_no_time_of_it():
    """The blocks leave it out too: the two are compared."""
    trained, evaluated = launched(1, 10, "kernel", 10, 18), launched(2, 60, "kernel", 18, 38)
    events = [host(PHASE + "forward", 0, 50), *trained, host(PHASE + "evaluation", 50, 90), *evaluated]
    times = read_profile(events)["milliseconds"]
    assert (times["busy"], times["rest"]) == (8, 8)


@pytest.mark.parametrize(
    ("layout", "left", "right", "inner", "outer"),
    [
        ("TN", [(128, 64)] * 2, [(16, 64), (48, 64)], 64, (128, 64)),
        ("NN", [(128, 64)] * 2, [(16, 128), (48, 128)], 128, (64, 64)),
        ("NT", [(16, 64), (48, 64)], [(16, 128), (48, 128)], 64, (128, 64)),
    ],
)
def test_a_grouped_product_counts_as_one_of_all_its_experts_rows(monkeypatch, layout, left, right, inner, outer):
    library = ModuleType("transformer_engine.grouped")
    library.general_grouped_gemm = lambda a, b, *args, layout="TN", **more: (len(a), len(b))
    monkeypatch.setitem(sys.modules, library.__name__, library)
    weights, rows = ([torch.ones(shape, dtype=torch.bfloat16) for shape in shapes] for shapes in (left, right))
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profiler, watch_transformer_engine():
        assert library.general_grouped_gemm(weights, rows, [], layout=layout, use_split_accumulator=True) == (2, 2)
    [label] = [event.name for event in profiler.events() if event.name.startswith(TE_RANGE)]
    found = te_product("forward", label, "nvjet")
    assert (found.inner, found.outer, found.kind) == (inner, outer, "bfloat16")
    assert found.flops == 2 * 64 * 64 * 128, "64 rows through weights of 64 x 128, in each role"


# -- between ranks -----------------------------------------------------------------------------------------------------


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


# -- a step of the 1B model --------------------------------------------------------------------------------------------

RECORDED = Path(__file__).parent.parent / "data" / "h200_1b_torchao_tensorwise_step.json.gz"
"""A training step of the 1B model in torchao's tensorwise recipe, as the profiler saw it on an H200, on 2026-11-20 with
torch 2.11.0+cu130 and torchao 0.18.0. At 4 x 2048 tokens the token count equals the intermediate size, so that several
roles share their extents."""
SHAPE = SHAPES["1b"]


def calls() -> list[LayerCall]:
    """The recorded step's."""
    hidden, wide, kv = SHAPE.hidden, SHAPE.intermediate, SHAPE.kv_heads * 64
    block = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (hidden, kv),
        "self_attn.v_proj": (hidden, kv),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (hidden, wide),
        "mlp.up_proj": (hidden, wide),
        "mlp.down_proj": (wide, hidden),
    }
    layers = [
        LayerCall(f"model.layers.{i}.{name}", *sizes, rows=SHAPE.batch * SHAPE.seq, fp8=True)
        for i in range(SHAPE.layers)
        for name, sizes in block.items()
    ]
    layers.append(LayerCall("lm_head", hidden, SHAPE.vocab, rows=SHAPE.batch * SHAPE.seq))
    kinds = [FP8] * (len(layers) - 1) + ["bfloat16"]
    return [
        replace(call, ran={role: Product(*call.expected(role), kind, "mm") for role in ROLES})
        for call, kind in zip(layers, kinds, strict=True)
    ]


@pytest.fixture(scope="module")
def profile():
    rows = json.loads(gzip.decompress(RECORDED.read_bytes()))
    return read_profile([TraceEvent(*row[:6], tuple(row[6]), tuple(row[7])) for row in rows])


def test_336_of_336_products_ran_in_fp8(profile):
    step = profiled_step(profile["products"], calls())
    assert role_table(step, calls()) == {role: {"expected": 112, "fp8": 112} for role in ("fprop", "dgrad", "wgrad")}
    assert step.fp8_share() == pytest.approx(0.787, abs=0.001)
    assert [other.operator for other in step.others] == ["bmm"], "the rotary embedding's outer product"


# -- time of several steps --------------------------------------------------------------------------------------------


def kernels(*spans):
    """Kernels as (start, end) in milliseconds, collectives with their kind behind; a mark is a single number."""
    events = []
    for span in spans:
        start, end, *collective = span if isinstance(span, tuple) else (span, span)
        name = "kernel" if isinstance(span, tuple) else "at::cuda::spin_kernel(long)"
        name = f"ncclDevKernel_{collective[0]}_RING_LL(ncclArgs)" if collective else name
        events.append(kernel(start, end, name))
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
        ([(2, 8, "AllReduce"), (4, 6, "AllGather")], [6, 0]),
        ([(0, 3), (3, 5, "AllReduce"), (5, 7)], [2]),
    ],
    ids=["between kernels", "within another", "touching"],
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
        [0, 0, 0, (0, 8), 8, 8, (8, 13), 13, (13, 17), 17],
    ],
    ids=["in the middle", "at the start"],
)
def test_an_evaluation_belongs_to_no_step(marks):
    found = read_steps(kernels(*marks))
    assert found == {"step_ms": [5, 4], "busy_ms": [5, 4], "compute_ms": [5, 4], "collectives": [[], []]}


@pytest.mark.parametrize("users", [True, False])
def test_no_garbage_is_collected_while_steps_are_timed_and_a_user_s_switch_stays(users):
    gc.enable() if users else gc.disable()
    seen = []

    @no_collections()
    def fails():
        seen.append(gc.isenabled())
        raise ValueError("a step")

    try:
        with pytest.raises(ValueError, match="a step"):
            fails()
        assert [*seen, gc.isenabled()] == [False, users]
    finally:
        gc.enable()


# -- what is in memory at the peak: events written by hand, and labels of a real step ----------------------------------

HELD = {1: 100, 2: 200, 3: 5}
"""Weights, optimizer, a workspace."""
RESIDENT = [Label(0, WEIGHTS, {1}), Label(0, OPTIMIZER, {2})]
FORWARD = [(10, 40), (11, 20), (12, 10), (12, 0)]
"""Two blocks that stay, the second of them in FP8, and one that is held for a moment."""
KEPT = [Label(4, COPIES, {11}), Label(4, ACTIVATIONS, {10, 11})]
BACKWARD = [(20, 30), (11, 0), (21, 15), (10, 0), (11, 50), (11, 0)]
"""A gradient (20), what is held for a moment (21), and another block at an address that was used before."""


@pytest.mark.parametrize(
    ("events", "labels", "uncounted", "kinds"),
    [
        ([], [], [], {WEIGHTS: 100, OPTIMIZER: 200, OTHER: 5}),
        (FORWARD, KEPT, [], {WEIGHTS: 100, OPTIMIZER: 200, OTHER: 15, ACTIVATIONS: 40, COPIES: 20}),
        (
            FORWARD + BACKWARD[:4],
            [*KEPT, Label(8, GRADIENTS, {20})],
            [],
            {WEIGHTS: 100, OPTIMIZER: 200, OTHER: 5, ACTIVATIONS: 40, COPIES: 20, GRADIENTS: 30},
        ),
        # At the later peak the address of a block that was FP8's belongs to one that nothing labels.
        (
            FORWARD + BACKWARD,
            [*KEPT, Label(10, GRADIENTS, {20})],
            [],
            {WEIGHTS: 100, OPTIMIZER: 200, OTHER: 5 + 15 + 50, GRADIENTS: 30},
        ),
        # An evaluation is no training.
        ([(30, 999), (30, 0), *FORWARD[:2]], [], [(0, 2)], {WEIGHTS: 100, OPTIMIZER: 200, OTHER: 65}),
    ],
)
def test_what_is_there_at_the_peak(events, labels, uncounted, kinds):
    assert at_peak(HELD, events, [*RESIDENT, *labels], uncounted) == kinds


@pytest.mark.parametrize(
    ("peak", "kinds"),
    [
        (1000, {WEIGHTS: 700, OTHER: 300}),
        (1010, {WEIGHTS: 700, OTHER: 310}),
        (1060, {}),
    ],
)
def test_the_kinds_add_up_to_what_the_allocator_counted(peak, kinds):
    assert summed_to({WEIGHTS: 700, OTHER: 300}, peak) == kinds


class KeepsFp8(torch.autograd.Function):
    """Keeps its input in FP8 for the backward pass, as FP8 layers do."""

    @staticmethod
    def forward(ctx, given):
        ctx.save_for_backward(given.to(torch.float8_e4m3fn))
        return given.clone()

    @staticmethod
    def backward(ctx, gradient):
        (kept,) = ctx.saved_tensors
        return gradient * kept.to(gradient.dtype)


def test_labels_of_a_real_step():
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU(), torch.nn.Linear(16, 16))
    model[0].copy = {"weight": model[0].weight.detach().to(torch.float8_e4m3fn)}
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 16)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    place = iter(range(1000))
    labels = StepLabels(SimpleNamespace(model=model, optimizer=optimizer), lambda: [(0, 0)] * next(place))
    labels.resident()
    with torch.autograd.graph.saved_tensors_hooks(labels.pack, lambda tensor: tensor):
        with labels.phase("forward"):
            loss = KeepsFp8.apply(model(torch.ones(4, 16))).sum()
        with labels.phase("backward"):
            loss.backward()
    labels.gradients()
    with labels.phase(EVALUATION), torch.no_grad():
        model(torch.ones(4, 16))

    def addresses(tensors):
        return {tensor.untyped_storage().data_ptr() for tensor in tensors}

    found = [(label.kind, label.addresses) for label in labels.labels]
    states = [value for state in optimizer.state.values() for value in state.values()]
    assert found[:3] == [
        (COPIES, addresses([model[0].copy["weight"]])),
        (WEIGHTS, addresses(model.parameters())),
        (OPTIMIZER, addresses(states)),
    ]
    assert [kind for kind, _ in found[3:]] == [COPIES, ACTIVATIONS, GRADIENTS]
    assert len(found[3][1]) == 1, "the one tensor that autograd keeps in FP8"
    assert found[5][1] == addresses(parameter.grad for parameter in model.parameters())
    assert [label.after for label in labels.labels] == sorted(label.after for label in labels.labels)
    assert len(labels.uncounted) == 1


@pytest.mark.parametrize(
    ("raised", "peak", "kinds"),
    [
        (None, 1540, {WEIGHTS: 512, OTHER: 1028}),
        (RuntimeError("torch.func.grad does not support saved tensor hooks"), 1540, {}),
        (torch.OutOfMemoryError("none left"), 1540, "raised"),
    ],
)
def test_a_step_that_cannot_be_watched_has_no_kinds(monkeypatch, raised, peak, kinds):
    model = torch.nn.Linear(4, 4, bias=False)
    # A weight and a block that the forward pass leaves.
    history = {model.weight.untyped_storage().data_ptr(): 512}, lambda: [(7, 1024)]
    monkeypatch.setattr(allocations, "allocator_history", lambda: nullcontext(history))

    def step(batch, phase, on_gradients):
        if raised is not None:
            raise raised
        with phase("forward"):
            model(batch)

    engine = SimpleNamespace(
        model=model, optimizer=torch.optim.SGD(model.parameters()), step=step, synchronize=lambda: None
    )
    if kinds == "raised":
        with pytest.raises(torch.OutOfMemoryError):
            allocations.kinds_at_peak(engine, torch.ones(2, 4), peak)
    else:
        assert allocations.kinds_at_peak(engine, torch.ones(2, 4), peak) == kinds
