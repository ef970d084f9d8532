"""A training step of the 1B model in torchao's tensorwise recipe, as the profiler saw it on an H200.

Recorded 2026-11-20 with torch 2.11.0+cu130 and torchao 0.18.0; read again here, without a GPU. At 4 x
2048 tokens the token count equals the intermediate size, so that several roles share their extents.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_fp8.questions.layers.products import FP8, LayerCall, Product, profiled_step, role_table
from pytest_fp8.recipes import ROLES
from pytest_fp8.worker.record.profile import read_profile
from pytest_fp8.worker.record.trace import TraceEvent
from pytest_fp8.zoo.shapes import SHAPES

pytestmark = pytest.mark.slow

RECORDED = Path(__file__).parent / "data" / "h200_1b_torchao_tensorwise_step.json.gz"
SHAPE = SHAPES["1b"]


def calls(*bf16: str) -> list[LayerCall]:
    """The recorded step's, in which these layers' forward products are in BF16."""
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
        LayerCall(f"model.layers.{i}.{name}", *sizes, rows=SHAPE.tokens, fp8=True)
        for i in range(SHAPE.layers)
        for name, sizes in block.items()
    ]
    layers.append(LayerCall("lm_head", hidden, SHAPE.vocab, rows=SHAPE.tokens))
    high = {name: {"fprop"} for name in bf16} | {"lm_head": set(ROLES)}

    def kind(call: LayerCall, role: str) -> str:
        return "bfloat16" if role in high.get(call.name, ()) else FP8

    return [replace(c, ran={role: Product(*c.expected(role), kind(c, role), "mm") for role in ROLES}) for c in layers]


@pytest.fixture(scope="module")
def profile():
    rows = json.loads(gzip.decompress(RECORDED.read_bytes()))
    return read_profile([TraceEvent(*row[:6], tuple(row[6]), tuple(row[7])) for row in rows])


def test_336_of_336_products_ran_in_fp8(profile):
    step = profiled_step(profile["products"], calls())
    assert role_table(step, calls()) == {role: {"expected": 112, "fp8": 112} for role in ("fprop", "dgrad", "wgrad")}
    assert step.fp8_share() == pytest.approx(0.787, abs=0.001)
    assert [other.operator for other in step.others] == ["bmm"], "the rotary embedding's outer product"


def test_each_product_has_its_kernel_and_attention_is_cudnns(profile):
    assert all("nvjet_sm90_q" in product.kernel for product in profile["products"] if product.kind == FP8)
    assert set(profile["attention"]) == {
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_cudnn_attention_backward",
    }


def test_one_forward_product_in_bf16_is_told_by_its_size_and_named_by_the_recorded_step(profile):
    products = list(profile["products"])
    down = [i for i, p in enumerate(products) if p.phase == "forward" and p.inner == SHAPE.intermediate]
    products[down[3]] = replace(products[down[3]], kind="bfloat16")
    down = [f"model.layers.{i}.mlp.down_proj" for i in range(SHAPE.layers)]

    def wrong(calls: list[LayerCall]) -> list[tuple[str, str, list[str]]]:
        step = profiled_step(products, calls)
        found = [a for a in step.attributions if a.kind != FP8 and a.layer != "lm_head"]
        return [(a.layer, a.role, [layer for layer, _ in a.among]) for a in found]

    assert wrong(calls(down[3])) == [(down[3], "fprop", [])], "the recorded step has it, too"
    [(_, role, among)] = wrong(calls())
    assert (role, among) == ("fprop", down), "of compiled code alone: whose it is is not known"
