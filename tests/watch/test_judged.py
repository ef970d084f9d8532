"""What is read of a profile of a GPU, and judged of a training, by hand-made events and evidence."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pytest_fp8.codes import W
from pytest_fp8.questions.layers.products import FP8 as FP8_KIND
from pytest_fp8.questions.layers.products import Product
from pytest_fp8.watch.attribution import attribute
from pytest_fp8.watch.judge import asked, judge
from pytest_fp8.watch.report import groups, table, verdict_of
from pytest_fp8.watch.trace import ENGINE, read_window

MAIN, ENGINE_S = 1, 2
SWAPPED = {"up": (64, 128), "down": (128, 64)}
FP8, BF16 = "c10::Float8_e4m3fn", "c10::BFloat16"


class Events:
    """Rows as the observer writes them; each host event launches at most one kernel."""

    def __init__(self):
        self.rows, self.now, self.numbers = [], 0, 0

    def host(self, name, thread=MAIN, shapes=(), dtypes=(), sequence=-1, kernel="", inner=()):
        start = self.now
        self.now += 1000
        for each in inner:
            each()
        if kernel:
            self.numbers += 1
            self.rows.append(
                ["cudaLaunchKernel", False, self.now, self.now + 10, thread, self.numbers, [], [], -1, None]
            )
            self.rows.append([kernel, True, self.now, self.now + 2_000_000, 7, self.numbers, [], [], -1, None])
            self.now += 2_000_000
        self.rows.append(
            [name, False, start, self.now, thread, 0, list(map(list, shapes)), list(dtypes), sequence, None]
        )
        self.now += 1000

    def product(self, left, right, dtype, thread=MAIN, kernel="nvjet_sm90_tst"):
        name = "aten::_scaled_mm" if dtype == FP8 else "aten::mm"
        node = -1 if thread == ENGINE_S else 4
        self.host(name, thread, (left, right), (dtype, dtype), node, kernel)

    def backward(self, node, *inner):
        self.host(f"{ENGINE}{node}", ENGINE_S, inner=[lambda: self.host(node, ENGINE_S, sequence=5, inner=inner)])


def layer(name, inputs, outputs, order=0):
    state = {"sure": True, "adapter": False, "fp8_layer": True}
    return {"name": name, "in": inputs, "out": outputs, "order": order, **state}


def test_a_step_of_a_gpu():
    """A Linear of 64 to 32 of 16 rows in FP8, recomputed in BF16; its casts, a collective and the optimizer."""
    events = Events()
    events.host("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__")
    region = lambda: events.product((16, 64), (64, 32), FP8, kernel="nvjet_sm90_qqtst_64x8")  # noqa: E731
    events.host("aten::abs", kernel="void at::native::elementwise<AbsFunctor>")
    compiled = lambda: events.host("CompiledFunction", inner=[region])  # noqa: E731
    events.host("Torch-Compiled Region: 0/0", inner=[compiled])
    events.host("aten::scaled_dot_product_attention", kernel="flash_fwd")
    again = lambda: events.product((16, 64), (64, 32), BF16, ENGINE_S)  # noqa: E731
    events.backward(
        "MmBackward0",
        lambda: events.host("aten::linear", ENGINE_S, sequence=9, inner=[again]),
        lambda: events.product((16, 32), (32, 64), FP8, ENGINE_S, "nvjet_sm90_qrtst_64x8"),
        lambda: events.product((32, 16), (16, 64), FP8, ENGINE_S, "nvjet_sm90_qrtst_64x8"),
    )
    events.host("c10d::allreduce_", ENGINE_S, kernel="ncclDevKernel_AllReduce_Sum")
    events.host("aten::_fused_adamw_", kernel="multi_tensor_apply_kernel")
    window = read_window(events.rows)
    assert [(product.phase, product.kind) for product in window.products] == [
        ("forward", "fp8"),
        ("recompute", "bfloat16"),
        ("backward", "fp8"),
        ("backward", "fp8"),
    ]
    assert (window.backward_passes, window.compiled, window.emulated) == (1, 1, 0)
    assert window.milliseconds == {
        "fp8 products": 6.0,
        "other products": 2.0,
        "attention": 2.0,
        "optimizer": 2.0,
        "communication": 2.0,
        "casts": 2.0,
        "rest": 0.0,
        "busy": 16.0,
    }
    found = attribute(window.products, [layer("proj", 64, 32, 0)])
    roles = {role: [product.kind for product in products] for role, products in found.classes[0].products.items()}
    assert roles == {"fprop": ["fp8"], "recompute": ["bfloat16"], "dgrad": ["fp8"], "wgrad": ["fp8"]}


def test_two_backward_passes_are_told_apart_by_what_runs_between_them():
    events = Events()
    for _ in range(2):
        events.product((16, 64), (64, 32), BF16)
        events.backward("A", lambda: events.product((16, 32), (32, 64), BF16, ENGINE_S))
        events.backward("B", lambda: events.product((32, 16), (16, 64), BF16, ENGINE_S))
    assert read_window(events.rows).backward_passes == 2


def test_a_product_kernel_of_no_operator_is_loose():
    events = Events()
    events.host("cudaGraphLaunch-like", kernel="nvjet_sm90_qqtst_64x8")
    events.backward("A", lambda: None)
    assert [kernel.name for kernel in read_window(events.rows).loose] == ["nvjet_sm90_qqtst_64x8"]


@pytest.mark.parametrize("sure", [True, False])
def test_layers_of_swapped_sizes(sure):
    """Up is in FP8 and down is not: their backward products have equal extents. Bare parameters as in LayerNormMLP."""
    events = Events()
    events.product((16, 64), (64, 128), FP8)
    events.product((16, 128), (128, 64), BF16)
    events.backward("D", lambda: events.product((16, 64), (64, 128), BF16, ENGINE_S))
    events.backward("W", lambda: events.product((64, 16), (16, 128), BF16, ENGINE_S))
    events.backward("D", lambda: events.product((16, 128), (128, 64), FP8, ENGINE_S))
    events.backward("W", lambda: events.product((128, 16), (16, 64), FP8, ENGINE_S))
    layers = [{**layer("up", 64, 128, 0), "sure": sure}, {**layer("down", 128, 64, 1), "sure": sure}]
    found = attribute(read_window(events.rows).products, layers)
    kinds = {
        each.label: {product.kind for products in each.products.values() for product in products}
        for each in found.classes
    }
    assert kinds == {"up": {"fp8"}, "down": {"bfloat16"}}
    assert found.others == []


def test_layers_of_swapped_sizes_in_two_models_of_which_one_is_in_fp8():
    events = Events()
    for dtype in (FP8, BF16):
        events.product((16, 64), (64, 128), dtype)
        events.product((16, 128), (128, 64), dtype)
        events.backward("W", lambda dtype=dtype: events.product((64, 16), (16, 128), dtype, ENGINE_S))
        events.backward("W", lambda dtype=dtype: events.product((128, 16), (16, 64), dtype, ENGINE_S))
    layers = [layer(f"{name}{model}", *sizes, 0) for model in "ab" for name, sizes in SWAPPED.items()]
    found = attribute(read_window(events.rows).products, layers)
    assert [each.kinds("wgrad") for each in found.classes] == [{"fp8": 1, "bfloat16": 1}] * 2


def test_a_product_of_other_rows_with_a_layer_s_weight_is_no_recomputation():
    """A tied decoder of some rows beside two layers of one size, and a stray product in the backward pass."""
    products = [Product("forward", 64, (48, 64), FP8_KIND, "mm")] * 2
    products += [
        Product("backward", 48, (64, 64), FP8_KIND, "mm"),
        Product("backward", 64, (48, 64), FP8_KIND, "mm"),
    ] * 2
    strays = [Product("backward", 64, (rows, 64), "bfloat16", "mm") for rows in (16, 20)]
    found = attribute([*products, *strays], [layer("one", 64, 64), layer("two", 64, 64)])
    (both,) = found.classes
    assert {role: len(ran) for role, ran in both.products.items()} == {"fprop": 2, "dgrad": 2, "wgrad": 2}
    assert found.others == strays


def test_layers_of_one_name_and_other_sizes_are_told_apart():
    products = [Product("forward", width, (48, 4 * width), FP8_KIND, "mm") for width in (64, 128) for _ in "ab"]
    sizes = {"a.0": 64, "a.1": 64, "b.0": 128, "b.1": 128}
    found = attribute(products, [layer(f"{name}.fc1", width, 4 * width) for name, width in sizes.items()])
    labels = [line.split()[:4] for line in table(found.classes)]
    assert labels[1:] == [["fc1", "128", "x", "512"], ["fc1", "64", "x", "256"]]


# -- what is judged of it ---------------------------------------------------------------------------------------------


def evidence(dtype, **told):
    """Of a training of one Linear on a GPU, its products in this type."""
    events = Events()
    events.product((16, 64), (64, 32), dtype)
    events.backward("MmBackward0", lambda: events.product((16, 32), (32, 64), dtype, ENGINE_S))
    state = {"class": "transformer_engine.pytorch.Linear", "dtype": "bfloat16", "trained": True, "stepped": True}
    state |= {"gradient": True}
    return {
        "pid": 1,
        "code": "",
        "reason": "",
        "device": {"type": "cuda", "name": "NVIDIA H100", "capability": [9, 0]},
        "environment": {},
        "arguments": [],
        "layers": [{**layer("proj", 64, 32), **state, "parent": ""}],
        "events": events.rows,
        **told,
    }


AUTOCAST = {"environment": {"ACCELERATE_MIXED_PRECISION": "fp8"}}


@pytest.mark.parametrize(
    ("dtype", "told", "verdict", "codes"),
    [
        (FP8, {"recipes": {"DelayedScaling(margin=0)": 1}}, "ON", []),
        (BF16, {"recipes": {"off": 1}}, "OFF", [W.SWITCHED_OFF]),
        (BF16, {"device": {"type": "cuda", "name": "NVIDIA A100", "capability": [8, 0]}}, "OFF", [W.NO_HARDWARE]),
        (BF16, AUTOCAST, "OFF", [W.STEPPED_AROUND]),
        (BF16, {**AUTOCAST, "settings": {"accelerate": "bf16"}}, "OFF", [W.OTHER_SETTING_DECIDES, W.STEPPED_AROUND]),
        (BF16, {"compiled_while_timed": 2}, "OFF", [W.STEPPED_AROUND, W.COMPILED_WHILE_TIMED]),
    ],
)
def test_whether_fp8_is_on_and_why_not(dtype, told, verdict, codes):
    training = judge(evidence(dtype, **told))
    assert (training.verdict, [note.code for note in training.notes]) == (verdict, codes)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--fp8"], ["--fp8"]),
        (["--fp8", "--steps", "0"], ["--fp8"]),
        (["--fp8", "1"], ["--fp8"]),
        (["--fp8", "0"], []),
        (["--use_fp8=False"], []),
        (["--no-fp8"], []),
        (["--precision=fp8"], ["--precision=fp8"]),
        (["--precision", "fp8"], ["fp8"]),
        (["fp8", "0"], ["fp8"]),
        (["runs/fp8/config.yaml"], []),
    ],
)
def test_arguments_that_ask_for_fp8(arguments, expected):
    assert asked(judge(evidence(BF16, arguments=arguments))) == expected


def test_a_recipe_says_its_options():
    from pytest_fp8.watch.model import recipes_in_force

    layer = type("Linear", (), {"__module__": "transformer_engine.pytorch", "fp8": True})()
    layer.fp8_meta, layer.modules = {"recipe": SimpleNamespace(margin=0)}, lambda: [layer]
    assert recipes_in_force([layer]) == {"SimpleNamespace(namespace(margin=0))": 1}


def test_the_worst_rank_decides():
    ranks = [
        judge(evidence(dtype, pid=number, rank=number, world=2, run="29500"))
        for number, dtype in enumerate([FP8, BF16])
    ]
    (group,) = groups(ranks)
    assert [each.verdict for each in group] == ["ON", "OFF"]
    assert verdict_of(group).evidence["rank"] == 1


def test_evidence_without_a_product_is_unknown():
    backward_alone = [row for row in evidence(BF16)["events"] if row[0].startswith(ENGINE)]
    for events, code in ((backward_alone, W.NO_PRODUCTS), ([], W.NOT_OBSERVED)):
        training = judge(evidence(BF16, events=events))
        assert (training.verdict, training.why.code) == ("UNKNOWN", code)
