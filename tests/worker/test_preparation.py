"""What an arm's process prepares: imports ahead, compilers, products on a CPU without BF16."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

# In processes of their own, because what is registered for a torch operator stays for the rest of the process.
PROGRAM = """
import torch
from torch.nn.functional import conv2d, conv_transpose2d, scaled_dot_product_attention
from pytest_fp8.worker.training.preparation import OPERANDS, multiply_bfloat16_through_float32

torch.ops.mkldnn._is_mkldnn_bf16_supported = lambda: False
OPERATORS = {
    "nt": (lambda x, y: x @ y.t(), (96, 80), (48, 80)),
    "with bias": (torch.nn.functional.linear, (5, 7, 80), (48, 80), (48,)),
    "with factors": (lambda b, x, y: torch.addmm(b, x, y, beta=0.5, alpha=2), (48,), (96, 80), (80, 48)),
    "many": (torch.bmm, (3, 96, 80), (3, 80, 48)),
    "many with bias": (lambda b, x, y: torch.baddbmm(b, x, y, beta=0.5), (3, 96, 48), (3, 96, 80), (3, 80, 48)),
    "convolution": (lambda x, w, b: conv2d(x, w, b, stride=2, padding=1), (2, 4, 9, 9), (6, 4, 3, 3), (6,)),
    "transposed": (conv_transpose2d, (2, 4, 9, 9), (4, 5, 3, 3), (5,)),
}

def answers(dtype):
    torch.manual_seed(0)
    for name, (function, *sizes) in OPERATORS.items():
        operands = [torch.randn(size).bfloat16().to(dtype).requires_grad_() for size in sizes]
        found = function(*operands)
        gradient = torch.randn(found.shape).bfloat16().to(dtype)
        yield name, (found, *torch.autograd.grad(found, operands, gradient))

# Attention's backward pass is as close to float32 as torch's own.
torch.manual_seed(0)
operands = [torch.randn(2, 4, 48, 64).bfloat16() for _ in range(4)]
mask = torch.ones(48, 48, dtype=torch.bool).tril()[None, None]

def gradients(dtype, **how):
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in operands[:3])
    scaled_dot_product_attention(q, k, v, **how).backward(operands[3].to(dtype))
    return [x.grad for x in (q, k, v)]

ways = ({"is_causal": True}, {"attn_mask": mask, "scale": 0.3})
attended = [(gradients(torch.float32, **how), gradients(torch.bfloat16, **how)) for how in ways]

plain = dict(answers(torch.float32))
# A process that serves one arm after another begins the next before the last is gone.
multiply_bfloat16_through_float32(torch.device("cpu"))
multiply_bfloat16_through_float32(torch.device("cpu"))
assert all("preparation.py" in torch._C._dispatch_dump(f"aten::{name}") for name in OPERANDS)
again = dict(answers(torch.float32))
for name, found in answers(torch.bfloat16):
    for exact, one, same in zip(plain[name], found, again[name]):
        assert one.dtype == torch.bfloat16, name
        assert torch.equal(same, exact), f"{name} of float32 operands"
        # A bias's gradient is a sum, which other operators take in BF16.
        assert torch.equal(one, exact.bfloat16()) or one.dim() == 1, name
for how, (exact, before) in zip(ways, attended):
    for one, two, three in zip(exact, before, gradients(torch.bfloat16, **how)):
        assert three.dtype == torch.bfloat16
        distance = [float((x.float() - one).norm() / one.norm()) for x in (two, three)]
        assert distance[1] <= min(distance[0], 0.005), (how, distance)
    assert all(torch.equal(x, y) for x, y in zip(exact, gradients(torch.float32, **how))), how
print("equal")
"""


def test_products_and_convolutions_are_those_of_float32_rounded_once():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.stdout == "equal\n", done.stderr


IMPORTS_AHEAD = """
import pathlib, sys
from pytest_fp8.worker import compilers, main
def there(*names):
    print(*(name in sys.modules for name in names))
pathlib.Path("unsloth.py").write_text("import __main__; __main__.there('unsloth', 'transformers')")
sys.path.insert(0, ".")
print(compilers.wait())
there("torch")
main.import_ahead("unsloth_bf16")
import torch
torch.cuda.is_available = lambda: True
compilers.start = lambda: there("transformers", "torch._inductor.compile_fx")
main.import_ahead("torchao")
"""


def test_unsloth_and_compilers_are_there_before_all_other_imports(tmp_path):
    """Nothing is waited for where none were started."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS_AHEAD], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert done.stdout.splitlines() == ["None", "False", "True False", "False False"]
