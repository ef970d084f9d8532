"""The accuracy of an FP8 layer's output against the same product in high precision."""

from __future__ import annotations

import math

import torch

ROWS = 256
"""Rows of a layer's input on which its output is computed again: enough for a mean, cheap beside the layer itself."""


@torch.no_grad()
def output_accuracy(module: torch.nn.Module, given: torch.Tensor, output: torch.Tensor) -> tuple[float, float]:
    """(gain, SQNR in dB) of a layer's output against ``x . W^T + b`` in float32 on the same input and weights.

    The gain is the least-squares factor between the two: 1 for correct scales, 2 for a scale that is off by two. SQNR
    is ``10 log10(|y|^2 / |y - q|^2)``; about 28 dB for e4m3 operands without outliers. (1, infinity) where there is no
    weight or the exact product is zero.
    """
    weight = module._parameters.get("weight")
    if weight is None:
        return 1.0, float("inf")
    rows = given.detach().reshape(-1, given.shape[-1])[:ROWS].float()
    bias = module._parameters.get("bias")
    # A weight that is kept in FP8 only: what remains to compare is the product and the cast of its input.
    dense = weight.detach().dequantize() if hasattr(weight, "qdata") else weight.detach()
    exact = rows @ dense.float().t()
    if bias is not None and bias.numel():
        exact += bias.detach().float()
    seen = output.detach().reshape(-1, output.shape[-1])[:ROWS].float()
    power = float(exact.square().sum())
    if power == 0:
        return 1.0, float("inf")
    noise = float((seen - exact).square().sum()) / power
    gain = float((seen * exact).sum()) / power
    return gain, -10 * math.log10(noise) if noise > 0 else float("inf")
