"""BF16 products on a CPU that has no instructions for them: a float32 product, rounded once."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from pytest_fp8.arms.preparation import multiply_bfloat16_through_float32

# In a process of its own: what is registered for a torch operator is there for all that follows in the same process.
PROGRAM = """
import torch
from pytest_fp8.arms.preparation import multiply_bfloat16_through_float32

torch.manual_seed(0)
torch.ops.mkldnn._is_mkldnn_bf16_supported = lambda: False
given, weight, gradient = (torch.randn(*size) for size in ((96, 512), (80, 512), (96, 80)))

def products(given, weight, gradient):
    return {"fprop": given @ weight.t(), "dgrad": gradient @ weight, "wgrad": gradient.t() @ given}

exact = [x.bfloat16().float() for x in (given, weight, gradient)]
expected = products(*exact)
asked, addmm = [], torch.addmm
torch.addmm = lambda bias, left, right, **more: asked.append(left.dtype) or addmm(bias, left, right, **more)
library = multiply_bfloat16_through_float32(torch.device("cpu"))
assert library is not None
found, plain = products(*(x.bfloat16() for x in exact)), products(*exact)
assert asked == [torch.float32] * 6, asked
for role, product in found.items():
    assert product.dtype == torch.bfloat16, role
    assert torch.equal(product, expected[role].bfloat16()), role
    assert torch.equal(plain[role], expected[role]), f"{role} of float32 operands"
print("equal")
"""


def test_all_three_layouts_are_float32_products_rounded_once():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.stdout == "equal\n", done.stderr


@pytest.mark.parametrize(("device", "supported"), [("cpu", True), ("cuda", True), ("cuda", False)])
def test_nothing_is_replaced_where_the_hardware_multiplies_bf16(monkeypatch, device, supported):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: supported)
    assert multiply_bfloat16_through_float32(torch.device(device)) is None
