"""BF16 products on a CPU without BF16 instructions: a float32 product, rounded once."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from pytest_fp8.worker.watch import cpu_products

pytestmark = pytest.mark.slow

# In a process of its own, because what is registered for a torch operator stays for the rest of the process.
PROGRAM = """
import torch
from pytest_fp8.worker.watch.cpu_products import multiply_bfloat16_through_float32

torch.manual_seed(0)
torch.ops.mkldnn._is_mkldnn_bf16_supported = lambda: False
given, weight, gradient = (torch.randn(*size) for size in ((96, 512), (80, 512), (96, 80)))

def products(given, weight, gradient):
    return {"fprop": given @ weight.t(), "dgrad": gradient @ weight, "wgrad": gradient.t() @ given}

exact = [x.bfloat16().float() for x in (given, weight, gradient)]
expected = products(*exact)
asked, addmm = [], torch.addmm
torch.addmm = lambda bias, left, right, **more: asked.append(left.dtype) or addmm(bias, left, right, **more)
multiply_bfloat16_through_float32(torch.device("cpu"))
found, plain = products(*(x.bfloat16() for x in exact)), products(*exact)
assert asked == [torch.float32] * 6, asked
for role, product in found.items():
    assert product.dtype == torch.bfloat16, role
    assert torch.equal(product, expected[role].bfloat16()), role
    assert torch.equal(plain[role], expected[role]), f"{role} of float32 operands"
print("equal")
"""

ATTENTION = """
import torch
from torch.nn.functional import scaled_dot_product_attention
from pytest_fp8.worker.watch.cpu_products import multiply_bfloat16_through_float32

torch.manual_seed(0)
torch.ops.mkldnn._is_mkldnn_bf16_supported = lambda: False
operands = [torch.randn(2, 4, 48, 64).bfloat16() for _ in range(4)]
mask = torch.ones(48, 48, dtype=torch.bool).tril()[None, None]

def gradients(dtype, **how):
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in operands[:3])
    scaled_dot_product_attention(q, k, v, **how).backward(operands[3].to(dtype))
    return [x.grad for x in (q, k, v)]

ways = ({"is_causal": True}, {"attn_mask": mask}, {"attn_mask": mask, "scale": 0.3}, {})
plain = [(gradients(torch.float32, **how), gradients(torch.bfloat16, **how)) for how in ways]
# A process that serves one arm after another begins the next before the last is gone.
for arm in range(2):
    multiply_bfloat16_through_float32(torch.device("cpu"))
for how, (exact, before) in zip(ways, plain):
    for one, two, three in zip(exact, before, gradients(torch.bfloat16, **how)):
        assert three.dtype == torch.bfloat16
        distance = [float((x.float() - one).norm() / one.norm()) for x in (two, three)]
        assert distance[1] <= min(distance[0], 0.005), (how, distance)
    assert all(torch.equal(x, y) for x, y in zip(exact, gradients(torch.float32, **how))), how
print("equal")
"""


def test_attentions_backward_pass_is_as_close_to_float32_as_torchs_own():
    done = subprocess.run([sys.executable, "-c", ATTENTION], capture_output=True, text=True, check=False)
    assert done.stdout == "equal\n", done.stderr


def test_all_three_layouts_are_float32_products_rounded_once():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.stdout == "equal\n", done.stderr


@pytest.mark.parametrize(("device", "supported"), [("cpu", True), ("cuda", True), ("cuda", False)])
def test_nothing_is_replaced_where_the_hardware_multiplies_bf16(monkeypatch, device, supported):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: supported)
    replaced = []
    monkeypatch.setattr(cpu_products, "replace_products", lambda: replaced.append(device))
    cpu_products.multiply_bfloat16_through_float32(torch.device(device))
    assert replaced == []
