"""BF16 products and convolutions on a CPU without BF16 instructions: computed in float32 and rounded once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

ATTENTION_BACKWARD = "_scaled_dot_product_flash_attention_for_cpu_backward"
OPERANDS = {
    "mm": 2,
    "addmm": 3,
    "bmm": 2,
    "baddbmm": 3,
    "convolution": 2,
    "convolution_backward": 3,
    ATTENTION_BACKWARD: 4,
}
"""Operator -> how many of its first arguments are tensors of the type that it computes in."""


def multiply_bfloat16_through_float32(device: torch.device) -> None:
    """On a CPU without BF16 instructions, compute products, convolutions and attention's backward pass of BF16 tensors
    in float32 and round once, from here on in this process.
    The result is that of BF16 operands with a float32 accumulator, as on a GPU. torch's own paths there take up to 25
    times as long: docs/measurements.md, "What an arm's own work takes"."""
    # Private: torch.backends.cpu names instruction sets, and no public name says whether BF16 is among them.
    if device.type == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        replace_products()


@functools.cache
def replace_products() -> torch.library.Library:
    """Register the float32 kernels. Cached, for a process may become one arm after another and torch 2.11 takes no
    second kernel for an operator."""
    # All of torch's own kernels are read before one is replaced.
    through = {name: _through_float32(name, operands) for name, operands in OPERANDS.items()}
    library = torch.library.Library("aten", "IMPL")
    for name, kernel in through.items():
        library.impl(name, kernel, "CPU")
    return library


def _through_float32(name: str, operands: int) -> Callable[..., Any]:
    own = torch.library.get_kernel(f"aten::{name}", "CPU")
    # Private: a kernel that torch.library.get_kernel() gives takes them, and torch.library has no class for them.
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

    def kernel(*given: Any, **named: Any) -> Any:
        if any(operand.dtype != torch.bfloat16 for operand in given[:operands]):
            return own.call_boxed(keys, *given, **named)
        wide = {key: _widened(value) for key, value in named.items()}
        found = own.call_boxed(keys, *map(_widened, given), **wide)
        return tuple(map(_rounded, found)) if isinstance(found, (tuple, list)) else _rounded(found)

    return kernel


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16 else value


def _rounded(value: Any) -> Any:
    return value.bfloat16() if isinstance(value, torch.Tensor) else value
